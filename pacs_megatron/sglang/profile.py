"""Profiles of SGLang servers while they sample a step (`observability.profile.servers`)."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pacs_megatron.config.schema import ProfileOptions
from pacs_megatron.errors import PacsError
from pacs_megatron.sglang.api import ServerRejectedError, SglangApi

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 600.0
"""Limit of the call that writes the files"""
_ACTIVITIES = {"nsys": ("CUDA_PROFILER",), "memory": ("MEM",)}
"""`observability.profile.kind` -> SGLang's activities, on a GPU"""


class ServerProfiler:
    """Profiles the servers of the listed steps. For rank 0 only.

    A server that cannot be profiled is a warning in the log and does not end the run.
    """

    def __init__(
        self, options: ProfileOptions, folder: Path, find: Callable[[], Sequence[SglangApi]]
    ) -> None:
        """Sends nothing.

        Args:
            options: `observability.profile`.
            folder: of the files, which the servers write: it must be on a file system that they
                share.
            find: returns the servers of a step.
        """
        self._options = options
        self._folder = folder.absolute()
        self._find = find

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profiles the servers during the body if `step` is listed."""
        if step not in self._options.steps:
            yield
            return

        apis: Sequence[SglangApi] = []
        try:
            apis = self._find()
        except PacsError as error:
            logger.warning("step %d has no profile of the servers: %s", step, error)

        started = self._on_each(apis, lambda api: self._start(api, step))
        try:
            yield
        finally:
            self._on_each(started, lambda api: self._stop(api, step))

    def _on_each(
        self, apis: Sequence[SglangApi], action: Callable[[SglangApi], bool]
    ) -> list[SglangApi]:
        """Runs `action` for all servers concurrently; returns those for which it is True."""
        if not apis:
            return []
        with ThreadPoolExecutor(len(apis), "profile") as pool:
            results = list(pool.map(action, apis))
        return [api for api, is_done in zip(apis, results, strict=True) if is_done]

    def _start(self, api: SglangApi, step: int) -> bool:
        options = self._options
        try:
            _, device = api.placement()
            if device == "cpu" and options.kind != "torch":
                logger.warning("%s has no profile of kind %s on the CPU", api.url, options.kind)
                return False
            on_torch = ("CPU",) if device == "cpu" else ("CPU", "GPU")
            activities = _ACTIVITIES.get(options.kind, on_torch)

            def start() -> None:
                api.start_profile(
                    str(self._folder), _name(api, step), activities, options.server_forwards
                )

            self._folder.mkdir(exist_ok=True)
            try:
                start()
            except ServerRejectedError:
                api.stop_profile(_STOP_TIMEOUT_S)  # of a run that was killed
                start()
        except (PacsError, OSError) as error:
            logger.warning("step %d has no profile of %s: %s", step, api.url, error)
            return False
        return True

    def _stop(self, api: SglangApi, step: int) -> bool:
        try:
            api.stop_profile(_STOP_TIMEOUT_S)
        except PacsError as error:
            logger.warning("step %d has no profile of %s: %s", step, api.url, error)
            return False

        name = _name(api, step)
        if self._options.kind == "torch" and not list(self._folder.glob(f"{name}-*")):
            logger.warning(
                "step %d: %s wrote no profile %s to %s; does its host share this folder?",
                step,
                api.url,
                name,
                self._folder,
            )
        return True


def _name(api: SglangApi, step: int) -> str:
    """`server-127.0.0.1-30000.5`"""
    address = urlsplit(api.url).netloc.replace(":", "-")
    return f"server-{address}.{step}"
