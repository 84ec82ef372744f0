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
from pacs_megatron.workbench.certify.compare import Deviations, compare
from pacs_megatron.workbench.certify.samples import lora_content, write_samples
from pacs_megatron.workbench.certify.shrink import Case, shrink
from pacs_megatron.workbench.plan.known_models import need_config

LIMIT_S = 900.0
"""Seconds after which a process counts as hung."""


_WITHOUT_CRITIC = ("qwen3_5_text", "qwen3_5_moe_text")
"""Families of which transformers has no class with a value for each token"""


class _FailedError(PacsError):
    """A process of the case failed: the certificate is red."""


def certify(
    config_path: Path, overrides: Sequence[str], *, out: Path | None = None, seed: int = 0
) -> Certificate | None:
    """Certifies a configuration and writes the certificate.

    Runs in processes on this host's CPU, or as a rank of a job on its GPUs.

    Args:
        config_path: a run file.
        overrides: `key=value` each.
        out: folder of the certificate; None: in the run's folder.
        seed: of the model and the samples.

    Returns:
        The certificate; None on all ranks of a job except 0.

    Raises:
        ConfigError: the layout does not fit the model, the objective has no formula, or the folder
            is not one of a certificate.
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
    if place is not None and place.rank:
        _import(case, place)
        _attempts_of_rank(case, work, place)
        return None

    _check_work_folder(work)
    check_free_disk(folder, 0)  # a few MB
    with RunLock(folder, "certify"):
        _import(case, place)
        deviations = _run_and_compare(case, work, place, seed)

    import torch

    certificate = Certificate.of(
        loaded,
        case,
        deviations,
        folder,
        seconds=time.monotonic() - start,
        on_gpu=place is not None and torch.cuda.is_available(),
    )
    certificate.write()
    return certificate


def make_case(loaded: LoadedConfig, world: int | None) -> Case:
    """The tiny case of a configuration.

    Args:
        world: ranks of this job; None: processes on this host's CPU.

    Raises:
        ConfigError: the layout does not fit the model, or the reference has no such layers.
    """
    config = loaded.config
    hf_config = need_config(config.model.path, loaded.where("model.path"))
    ranks = world or ranks_to_start(config)
    name = Path(config.model.path).name
    spec = read_spec(hf_config)
    if config.objective.name == "ppo" and spec.family in _WITHOUT_CRITIC:
        raise ConfigError(
            f"certify has no reference for ppo with {name}: transformers has no critic of "
            f"{spec.family}; certify the layout with another objective"
        )
    problems = layout_problems(config, ranks) + shape_problems(config, spec, name)
    if problems:
        raise loaded.fail(problems[0])
    return shrink(config, hf_config, layout_of(config, ranks), world=world)


def _check_work_folder(work: Path) -> None:
    """The folder is removed, so it must be one that `certify` wrote."""
    is_own = not work.exists() or (work / "product").is_dir()
    if work.is_symlink() or not is_own:
        raise ConfigError(
            f"{work} is not of an earlier `certify`; remove it, or choose another --out"
        )


def _import(case: Case, place: RankPlace | None) -> None:
    """Sets the ranks' environment, then imports the modules once before the fork, because an import
    takes seconds.
    """
    local_world_size = 1 if place is None else place.local_world_size
    os.environ.update(rank_environment(local_world_size, single_host=place is None))
    if place is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with report_wait("for torch, transformers and Megatron to load"):
        import torch
        import transformers  # noqa: F401 - for the processes that are forked from this one

        import pacs_megatron.workbench.certify.ranks  # noqa: F401
        from pacs_megatron.workbench.certify.formulas import OBJECTIVES

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    name = case.config.objective.name
    if name not in OBJECTIVES:
        raise ConfigError(
            f"certify has no reference for objective.name={name}; add its formula (docs/certify.md)"
        )


def _run_and_compare(case: Case, work: Path, place: RankPlace | None, seed: int) -> Deviations:
    """Runs the case in the empty folder `work`, compares its files and removes them.

    A process that fails is a deviation, unless the disk is full: the configuration is not the
    cause.
    """
    is_bf16 = case.config.precision.dtype == "bf16"
    shutil.rmtree(work, ignore_errors=True)
    (work / "product").mkdir(parents=True)
    try:
        _run(case, work, place, seed)
        return compare(work, updates_before_resume=case.stop_after, is_bf16=is_bf16)
    except _FailedError as error:
        full_disk = disk_error(work)
        if full_disk is not None:
            with naming(work):
                raise full_disk from error
        return Deviations(is_bf16=is_bf16, first=str(error))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run(case: Case, work: Path, place: RankPlace | None, seed: int) -> None:
    """All phases.

    The reference trains beside the conversion, after the ranks, whose log-probs it needs.
    """
    from pacs_megatron.workbench.certify import probe, ranks, reference

    write_samples(case, work, seed)
    start = partial(Processes, work, limit_s=LIMIT_S)
    start("preparation", partial(_prepare, case, work, seed)).wait(_FailedError)
    start("objective", partial(probe.write_probes, case, work, seed)).wait(_FailedError)

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


def _prepare(case: Case, work: Path, seed: int) -> None:
    """Writes the random model, and completes the case with it."""
    from pacs_megatron.workbench.certify.reference import Reference
    from pacs_megatron.workbench.certify.reference_model import random_model

    random_model(
        work / "model",
        seed,
        objective=case.config.objective.name,
        lora=lora_content(case.config),
    )
    Reference(work).prepare()


def _attempts_of_rank(case: Case, work: Path, place: RankPlace) -> None:
    """Both attempts in this process, a rank of a job."""
    from pacs_megatron.workbench.certify import ranks

    os.environ.update(place.variables())
    for number in (0, 1):
        ranks.attempt(case, work, number)
