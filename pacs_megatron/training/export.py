"""Export of the policy as a Hugging Face checkpoint at the end of a run."""

import shutil
from pathlib import Path

from pacs_megatron.checkpoint.hf_folder import HfFolderWriter, hf_tensors
from pacs_megatron.policy.engine import MegatronPolicy
from pacs_megatron.training.context import RunContext


def export_hf(run: RunContext, model: MegatronPolicy, target: Path) -> None:
    """Writes the weights of `model` with config and tokenizer to `target`, which it replaces. Collective.

    Rank 0 writes, one tensor at a time.
    """
    with run.timer.span("export"):
        if run.rank.rank:
            for _ in model.export_weights():
                pass
            return
        if target.exists():
            shutil.rmtree(target)
        tensors = hf_tensors(model.table.entries, model.config.params_dtype)
        with HfFolderWriter(target, tensors) as writer:
            for name, tensor in model.export_weights():
                writer.put(name, tensor.cpu())
            writer.finish(run.model_dir)
