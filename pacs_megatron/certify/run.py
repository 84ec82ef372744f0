"""`certify`: make a tiny case, train it on the product's ranks and on the reference, compare, write the certificate."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from pacs_megatron.certify.certificate import Certificate, certificate_folder
from pacs_megatron.certify.compare import Comparison, compare
from pacs_megatron.certify.shrink import Case, shrink, write_samples
from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.checks import layout_problems
from pacs_megatron.config.layout import layout_of, ranks_to_start
from pacs_megatron.errors import ConfigError, PacsError
from pacs_megatron.models import read_spec
from pacs_megatron.models.shape import shape_problems
from pacs_megatron.plan.known_models import need_config
from pacs_megatron.runtime.environment import RankPlace, find_rank, rank_environment
from pacs_megatron.runtime.processes import die_with_parent

LIMIT_S = 900.0
"""A case that takes longer hangs."""
_NOTICE_S, _GRACE_S = 10.0, 2.0


class _FailedError(PacsError):
    """A process of the case failed: the certificate is red."""


def certify(
    config_path: Path, overrides: Sequence[str], *, out: Path | None = None, seed: int = 0
) -> Certificate | None:
    """Certifies a configuration and writes the certificate to `out` (default: the run's folder).

    With processes on this host's CPU; as a rank of a job, on its GPUs, and then None on all ranks but 0.
    """
    loaded = load_config(config_path, overrides)
    place = find_rank(os.environ)
    case = make_case(loaded, None if place is None else place.world_size)
    folder = out or certificate_folder(loaded)
    work = folder / ".work"
    start, comparison = time.monotonic(), Comparison(is_bf16=case.config.precision.dtype == "bf16")
    _import(place)
    if place is not None and place.rank:
        _attempts_of_rank(case, work, place)
        return None
    shutil.rmtree(work, ignore_errors=True)
    (work / "product").mkdir(parents=True)
    try:
        with _Processes(work) as processes:
            try:
                _run(case, work, place, processes, seed)
            except _FailedError as error:
                comparison.fail(str(error))
            else:
                comparison = compare(work, updates_before_resume=case.stop_after, is_bf16=comparison.is_bf16)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    seconds = time.monotonic() - start
    certificate = Certificate.of(loaded, case, comparison, folder, seconds=seconds, on_gpu=place is not None)
    certificate.write()
    return certificate


def make_case(loaded: LoadedConfig, world: int | None) -> Case:
    """The tiny case of a configuration. Raises ConfigError if its layout does not fit its model."""
    config = loaded.config
    hf_config = need_config(config.model.path, loaded.where("model.path"))
    ranks = world or ranks_to_start(config)
    problems = layout_problems(config, ranks) + shape_problems(
        config, read_spec(hf_config), Path(config.model.path).name
    )
    if problems:
        raise loaded.fail(problems[0])
    return shrink(config, hf_config, layout_of(config, ranks), world=world)


def _import(place: RankPlace | None) -> None:
    """Sets the ranks' environment, then imports once, before the processes fork: each would need seconds."""
    os.environ.update(rank_environment(1 if place is None else place.local_world_size, single_host=place is None))
    if place is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    import transformers  # noqa: F401

    import pacs_megatron.certify.ranks
    import pacs_megatron.certify.reference  # noqa: F401

    torch.set_num_threads(1)  # a pool of threads does not survive a fork


def _run(case: Case, work: Path, place: RankPlace | None, processes: _Processes, seed: int) -> None:
    """All phases. The reference trains beside the ranks."""
    from pacs_megatron.certify import ranks, reference

    if case.config.objective.name not in reference.OBJECTIVES:
        raise ConfigError(f"certify has no reference for objective {case.config.objective.name} yet (docs/certify.md)")
    write_samples(case, work, seed)

    def prepare() -> None:
        reference.random_model(work / "model", seed)
        reference.Reference(work).prepare()

    processes.wait([processes.start("preparation", prepare)])
    trainer = processes.start("reference", lambda: reference.Reference(work).train())
    if place is not None:
        _attempts_of_rank(case, work, place)
    for number in (0, 1) if place is None else ():
        world, port = case.layouts[number].world_size, _free_port()
        pids = []
        for rank in range(world):
            variables = RankPlace(rank, world, rank, world, "127.0.0.1", port).variables()
            name = f"attempt {number + 1}, rank {rank}"
            pids.append(processes.start(name, partial(ranks.attempt, case, work, number), variables))
        processes.wait(pids)
    processes.wait([processes.start("conversion", partial(ranks.convert, work)), trainer])


def _attempts_of_rank(case: Case, work: Path, place: RankPlace) -> None:
    """Both attempts in this process, a rank of a job."""
    from pacs_megatron.certify import ranks

    os.environ.update(place.variables())
    for number in (0, 1):
        ranks.attempt(case, work, number)


class _Processes:
    """Forked processes with a log each; none outlives the `with` block."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._names: dict[int, str] = {}
        self._start = self._notice = time.monotonic()

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_error: object) -> None:
        for pid in self._names:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def start(self, name: str, action: Callable[[], None], variables: Mapping[str, str] | None = None) -> int:
        """Runs `action` in a process with these environment variables; returns its pid."""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self._names[pid] = name
            return pid
        code = 1
        try:
            die_with_parent()
            log = os.open(self._work / f"{name}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(variables or {})
            action()
            code = 0
        except BaseException as error:  # noqa: BLE001  the parent reports every failure
            traceback.print_exc()
            text = f"{name}: {type(error).__name__}: {error}"
            (self._work / f"{name}.error").write_text(text)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self, pids: Sequence[int]) -> None:
        """Until all have ended. Raises _FailedError when one fails or the limit has passed."""
        left, failed_at = set(pids), None
        while left:
            for pid in sorted(left):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    left.remove(pid)
                    name = self._names.pop(pid)
                    if status and not (self._work / f"{name}.error").exists():
                        (self._work / f"{name}.error").write_text(f"{name}: ended with wait status {status}")
                    failed_at = failed_at or (time.monotonic() if status else None)
            now = time.monotonic()
            if not left or (failed_at is not None and now - failed_at > _GRACE_S):
                break
            if now - self._start > LIMIT_S:
                raise _FailedError(f"{self._names[min(left)]}: no end after {LIMIT_S:.0f} s")
            if now - self._notice > _NOTICE_S:
                self._notice = now
                sys.stderr.write(f"certify: {self._names[min(left)]}, {now - self._start:.0f} s\n")
            time.sleep(0.02)
        # An error of the product is more specific than the connections that it broke.
        errors = [file.read_text() for file in sorted(self._work.glob("*.error"))]
        if errors:
            raise _FailedError(min(errors, key=lambda text: "Connection" in text or "wait status" in text))


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
