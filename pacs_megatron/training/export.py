"""Exports the weights of a run as a Hugging Face folder, which replaces the earlier one, and its
adapters as PEFT's folder.
"""

import shutil
from pathlib import Path

from pacs_megatron.checkpoint.adapters import write_peft
from pacs_megatron.checkpoint.beside import Beside
from pacs_megatron.checkpoint.hf_folder import HfFolderWriter, hf_tensors
from pacs_megatron.models.lora import peft_config
from pacs_megatron.policy.engine import MegatronPolicy
from pacs_megatron.runtime.files import remove
from pacs_megatron.training.context import RunContext


def export_hf(run: RunContext, model: MegatronPolicy, target: Path) -> None:
    """Writes the weights of `model` with config and tokenizer to `target`, which it replaces.

    Collective; rank 0 writes.
    """
    with run.timer.span("export"):
        if run.rank.rank:
            for _ in model.export_weights():  # collective
                pass
            return

        beside = Beside(run.model_dir)
        previous = target.with_name(f"{target.name}.before")
        if target.exists():
            if previous.exists():  # the last attempt ended before `_remove_previous`
                _remove_previous(previous, target)
            target.rename(previous)

        tensors = hf_tensors(model.table.entries, model.config.params_dtype)
        kept = [] if model.spec.head == "value" else beside.infos
        with HfFolderWriter(target, tensors + kept) as writer:
            for name, tensor in model.export_weights():
                writer.put(name, tensor.cpu())
            for info in kept:
                writer.put(info.name, beside.get(info.name))
            writer.finish(run.model_dir, run.stop_token_ids)

        if previous.exists():
            _remove_previous(previous, target)


def export_adapters(run: RunContext, target: Path) -> None:
    """Writes the adapters as PEFT's folder to `target`, which it replaces.

    Collective; rank 0 writes.
    """
    options = run.config.policy.lora
    assert options is not None
    tensors = {}
    for name, tensor in run.policy.export_adapters():
        if run.rank.rank == 0:
            tensors[name] = tensor.cpu()
    if run.rank.rank == 0:
        remove(target)
        write_peft(target, tensors, peft_config(run.policy.spec, options, run.config.model.path))


def _remove_previous(previous: Path, target: Path) -> None:
    """Removes an earlier export.

    Files that an export does not write are the user's, and move to `target`.
    """
    for path in previous.iterdir():
        if ".safetensors" not in path.name and not (target / path.name).exists():
            path.rename(target / path.name)
    shutil.rmtree(previous)
