"""`certify`: trains a tiny case on the product's ranks and on the reference, compares, writes a
certificate.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pacs_megatron.checkpoint.staging import check_free_disk
from pacs_megatron.config import LoadedConfig, load_config
from pacs_megatron.config.checks import layout_problems
from pacs_megatron.config.layout import layout_of, ranks_to_start
from pacs_megatron.errors import ConfigError, PacsError
from pacs_megatron.launch.certified import CERTIFICATE_FILE, certificate_folder
from pacs_megatron.models import read_spec
from pacs_megatron.models.shape import shape_problems
from pacs_megatron.runtime.environment import RankPlace, find_rank, rank_environment
from pacs_megatron.runtime.files import check_output, disk_error, naming
from pacs_megatron.runtime.rank_processes import Processes
from pacs_megatron.runtime.run_lock import RunLock
from pacs_megatron.runtime.waiting import report_wait
from pacs_megatron.workbench.certify.certificate import Certificate
from pacs_megatron.workbench.certify.compare import Comparison, compare
from pacs_megatron.workbench.certify.shrink import Case, shrink, write_samples
from pacs_megatron.workbench.plan.known_models import need_config

LIMIT_S = 900.0
"""Seconds after which a process counts as hung."""


class _FailedError(PacsError):
    """A process of the case failed: the certificate is red."""


def certify(
    config_path: Path, overrides: Sequence[str], *, out: Path | None = None, seed: int = 0
) -> Certificate | None:
    """Certifies a configuration and writes the certificate to `out` (default: the run's folder).

    Runs in processes on this host's CPU, or as a rank of a job on its GPUs; then returns None on
    all ranks except 0.
    """
    loaded = load_config(config_path, overrides)
    place = find_rank(os.environ)
    case = make_case(loaded, None if place is None else place.world_size)
    folder = out or certificate_folder(loaded)
    check_output(folder / CERTIFICATE_FILE, b'{\n "result": ')  # an export's certificate is kept
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} is the folder of a model; choose another --out")
    work = folder / ".work"
    start = time.monotonic()
    is_bf16 = case.config.precision.dtype == "bf16"
    if place is not None and place.rank:
        _import(case, place)
        _attempts_of_rank(case, work, place)
        return None
    if work.is_symlink() or (work.exists() and not (work / "product").is_dir()):
        raise ConfigError(
            f"{work} is not of an earlier `certify`; remove it, or choose another --out"
        )
    check_free_disk(folder, 0)  # a few MB
    with RunLock(folder, "certify"):
        _import(case, place)
        shutil.rmtree(work, ignore_errors=True)
        (work / "product").mkdir(parents=True)
        try:
            _run(case, work, place, seed)
            found = compare(work, updates_before_resume=case.stop_after, is_bf16=is_bf16)
        except _FailedError as error:
            if (disk := disk_error(work)) is not None:
                with naming(work):
                    raise disk from error  # the configuration is not the cause
            found = Comparison(is_bf16=is_bf16, first=str(error))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    import torch

    seconds = time.monotonic() - start
    on_gpu = place is not None and torch.cuda.is_available()
    certificate = Certificate.of(loaded, case, found, folder, seconds=seconds, on_gpu=on_gpu)
    certificate.write()
    return certificate


def make_case(loaded: LoadedConfig, world: int | None) -> Case:
    """The tiny case of a configuration. Raises ConfigError if its layout does not fit its model."""
    config = loaded.config
    hf_config = need_config(config.model.path, loaded.where("model.path"))
    ranks = world or ranks_to_start(config)
    name = Path(config.model.path).name
    if problems := layout_problems(config, ranks) + shape_problems(
        config, read_spec(hf_config), name
    ):
        raise loaded.fail(problems[0])
    return shrink(config, hf_config, layout_of(config, ranks), world=world)


def _import(case: Case, place: RankPlace | None) -> None:
    """Sets the ranks' environment, then imports the modules once before the fork, because an import
    takes seconds.
    """
    os.environ.update(
        rank_environment(1 if place is None else place.local_world_size, single_host=place is None)
    )
    if place is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with report_wait("for torch, transformers and Megatron to load"):
        import torch
        import transformers

        import pacs_megatron.workbench.certify.ranks
        from pacs_megatron.workbench.certify.formulas import OBJECTIVES

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    if (name := case.config.objective.name) not in OBJECTIVES:
        raise ConfigError(
            f"certify has no reference for objective.name={name}; add its formula (docs/certify.md)"
        )


def _run(case: Case, work: Path, place: RankPlace | None, seed: int) -> None:
    """All phases.

    The reference trains beside the conversion, after the ranks, whose log-probs it needs.
    """
    from pacs_megatron.workbench.certify import ranks, reference

    write_samples(case, work, seed)

    def prepare() -> None:
        reference.random_model(
            work / "model", seed, with_critic=case.config.objective.name == "ppo"
        )
        reference.Reference(work).prepare()

    start = partial(Processes, work, limit_s=LIMIT_S)
    start("preparation", prepare).wait(_FailedError)
    if place is not None:
        _attempts_of_rank(case, work, place)
    else:
        for number, layout in enumerate(case.layouts):
            attempt = partial(ranks.attempt, case, work, number)
            start(f"attempt {number + 1}", attempt, layout.world_size).wait(_FailedError)
    trainer = start("reference", lambda: reference.Reference(work).train())
    try:
        start("conversion", partial(ranks.convert, work)).wait(_FailedError)
        trainer.wait(_FailedError)
    finally:
        trainer.end()


def _attempts_of_rank(case: Case, work: Path, place: RankPlace) -> None:
    """Both attempts in this process, a rank of a job."""
    from pacs_megatron.workbench.certify import ranks

    os.environ.update(place.variables())
    for number in (0, 1):
        ranks.attempt(case, work, number)
