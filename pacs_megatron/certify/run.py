"""`certify`: make a tiny case, train it on the product's ranks and on the reference, compare, write the certificate."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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

LIMIT_S = 900.0
"""A process that takes longer hangs."""
_NOTICE_S = 10.0


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
    start, is_bf16 = time.monotonic(), case.config.precision.dtype == "bf16"
    _import(case, place)
    if place is not None and place.rank:
        _attempts_of_rank(case, work, place)
        return None
    shutil.rmtree(work, ignore_errors=True)
    (work / "product").mkdir(parents=True)
    try:
        _run(case, work, place, seed)
        found = compare(work, updates_before_resume=case.stop_after, is_bf16=is_bf16)
    except _FailedError as error:
        found = Comparison(is_bf16=is_bf16, first=str(error))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    seconds = time.monotonic() - start
    import torch

    on_gpu = place is not None and torch.cuda.is_available()
    certificate = Certificate.of(loaded, case, found, folder, seconds=seconds, on_gpu=on_gpu)
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


def _import(case: Case, place: RankPlace | None) -> None:
    """Sets the ranks' environment, then imports once, before the processes fork: each would need seconds."""
    os.environ.update(rank_environment(1 if place is None else place.local_world_size, single_host=place is None))
    if place is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    import transformers  # noqa: F401

    import pacs_megatron.certify.ranks  # noqa: F401
    from pacs_megatron.certify.formulas import OBJECTIVES

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    if case.config.objective.name not in OBJECTIVES:
        raise ConfigError(f"certify has no reference for objective {case.config.objective.name} yet (docs/certify.md)")


def _run(case: Case, work: Path, place: RankPlace | None, seed: int) -> None:
    """All phases. The reference trains beside the conversion, after the ranks, whose log-probs it needs."""
    from pacs_megatron.certify import ranks, reference

    write_samples(case, work, seed)

    def prepare() -> None:
        reference.random_model(work / "model", seed)
        reference.Reference(work).prepare()

    _Processes(work, "preparation", prepare).wait()
    if place is not None:
        _attempts_of_rank(case, work, place)
    for number in (0, 1) if place is None else ():
        world = case.layouts[number].world_size
        _Processes(work, f"attempt {number + 1}", partial(ranks.attempt, case, work, number), world).wait()
    trainer = _Processes(work, "reference", lambda: reference.Reference(work).train())
    try:
        _Processes(work, "conversion", partial(ranks.convert, work)).wait()
        trainer.wait()
    finally:
        trainer.end()


def _attempts_of_rank(case: Case, work: Path, place: RankPlace) -> None:
    """Both attempts in this process, a rank of a job."""
    from pacs_megatron.certify import ranks

    os.environ.update(place.variables())
    for number in (0, 1):
        ranks.attempt(case, work, number)


class _Processes:
    """Forked processes that run `action`, each with a log; with `world`, as ranks of a world of that size."""

    def __init__(self, work: Path, name: str, action: Callable[[], None], world: int = 0) -> None:
        from torch.multiprocessing.spawn import start_processes

        self._work, self._name, self._start = work, name, time.monotonic()
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        options: dict[str, Any] = {"join": False, "daemon": True, "start_method": "fork"}
        arguments = (action, world, port)
        self._context: Any = start_processes(self._child, arguments, nprocs=world or 1, **options)  # type: ignore[no-untyped-call]

    def _child(self, rank: int, action: Callable[[], None], world: int, port: int) -> None:
        log = os.open(self._work / f"{self._name} {rank}.log", os.O_CREAT | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(log, stream)
        if world:
            os.environ.update(RankPlace(rank, world, rank, world, "127.0.0.1", port).variables())
        try:
            action()
        except BaseException as error:
            line = f"{self._name}, rank {rank}: {type(error).__name__}: {error}"
            (self._work / f"{self._name} {rank}.error").write_text(line)
            raise

    def wait(self) -> None:
        """Until all have ended. Raises _FailedError when one fails or the limit has passed."""
        from torch.multiprocessing.spawn import ProcessException

        notice = self._start
        try:
            while not self._context.join(timeout=_NOTICE_S, grace_period=2.0):
                now = time.monotonic()
                if now - self._start > LIMIT_S:
                    raise _FailedError(f"{self._name}: no end after {LIMIT_S:.0f} s")
                if now - notice >= _NOTICE_S:
                    notice = now
                    sys.stderr.write(f"certify: {self._name}, {now - self._start:.0f} s\n")
        except ProcessException as failure:
            errors = [file.read_text() for file in sorted(self._work.glob("*.error"))]
            # An error of the product is more specific than the connections that it broke.
            found = min(errors, key=lambda text: "onnection" in text, default=f"{self._name}: {failure}")
            raise _FailedError(found) from None
        finally:
            self.end()

    def end(self) -> None:
        for process in self._context.processes:
            process.kill()
            process.join()
