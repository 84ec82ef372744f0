"""Writes the folder peft_adapters/: adapters that PEFT has made, trained and saved, in float64.

Not a test, and PEFT is in no environment of the project. In an environment of its own:
    pip install peft==0.21.2 transformers==5.19.0 && python -m tests.golden.make_peft_golden
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.support.policies.lora_trainer import PEFT_CASE, nll, peft_base

FOLDER = Path(__file__).with_name("peft_adapters")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = peft_base(Path(folder))
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    config = LoraConfig(
        r=PEFT_CASE["rank"],
        lora_alpha=PEFT_CASE["alpha"],
        target_modules=list(PEFT_CASE["targets"]),
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = "BASE"
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.2 * values)  # representable in fp32
    adapted.to(torch.float64)
    adapted.save_pretrained(FOLDER / "start")
    (FOLDER / "start" / "README.md").unlink(missing_ok=True)

    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3, weight_decay=0.0)
    losses = []
    for seed in range(3):
        optimizer.zero_grad()
        loss = nll(adapted, seed)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    adapted.save_pretrained(FOLDER / "trained")
    for name in ("README.md", "adapter_config.json"):
        (FOLDER / "trained" / name).unlink(missing_ok=True)
    merged = adapted.merge_and_unload()
    name = "model.layers.1.mlp.up_proj.weight"
    found = {"losses": torch.stack(losses), f"merged.{name}": merged.get_parameter(name).detach()}
    save_file(found, FOLDER / "found.safetensors")


if __name__ == "__main__":
    main()
