"""A hybrid in float64, written from the papers, one unpacked sample at a time.

Gated delta rule: Yang, Kautz and Hatamizadeh, arXiv:2412.06464, equation 10. It imports nothing of
the product and nothing of transformers; parameters have the names of a checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.policies.plain_trainer import PlainTrainer
from tests.support.policies.policy_cases import OPTIMIZER


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The outputs of one head: S = S (a (I - b k k^T)) + b v k^T, token by token.

    Args:
        query: [t, key], scaled.
        key: [t, key].
        value: [t, value].
        decay: [t], a.
        beta: [t], b.

    Returns:
        [t, value], S q.
    """
    size = key.shape[1]
    state = value.new_zeros(value.shape[1], size)
    outputs = []
    for q, k, v, a, b in zip(query, key, value, decay, beta, strict=True):
        erase = torch.eye(size, dtype=key.dtype) - b * torch.outer(k, k)
        state = state @ (a * erase) + b * torch.outer(v, k)
        outputs.append(state @ q)
    return torch.stack(outputs)


class HybridReference(torch.nn.Module):
    """Logits of a Qwen3-Next or Qwen3.5 language model from its folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.named = {
            name: torch.nn.Parameter(tensor.double())
            for name, tensor in load_file(folder / "model.safetensors").items()
        }

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self.named.values())

    def forward(self, ids: Tensor) -> Any:
        x = self.named["model.embed_tokens.weight"][ids[0]]
        for layer, kind in enumerate(self.config["layer_types"]):
            mixer = self._delta_net if kind == "linear_attention" else self._attention
            prefix = f"model.layers.{layer}"
            x = x + mixer(prefix, self._norm(x, f"{prefix}.input_layernorm"))
            x = x + self._mlp(prefix, self._norm(x, f"{prefix}.post_attention_layernorm"))
        x = self._norm(x, "model.norm")
        head = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        return SimpleNamespace(logits=(x @ self.named[f"{head}.weight"].T)[None])

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.named[f"{name}.weight"].T

    def _unit(self, x: Tensor) -> Tensor:
        """`x` with a root mean square of 1."""
        eps: float = self.config["rms_norm_eps"]
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        """The norm around 1: the weight is the difference from it."""
        return self._unit(x) * (1 + self.named[f"{name}.weight"])

    def _mlp(self, prefix: str, x: Tensor) -> Tensor:
        if f"{prefix}.mlp.gate.weight" not in self.named:
            return self._swiglu(f"{prefix}.mlp", x)
        probabilities = self._linear(x, f"{prefix}.mlp.gate").softmax(-1)
        top, experts = probabilities.topk(self.config["num_experts_per_tok"])
        top = top / top.sum(-1, keepdim=True)
        shared = torch.sigmoid(self._linear(x, f"{prefix}.mlp.shared_expert_gate"))
        rows = []
        for token in range(len(x)):
            row = shared[token] * self._swiglu(f"{prefix}.mlp.shared_expert", x[token])
            for weight, expert in zip(top[token], experts[token].tolist(), strict=True):
                row = row + weight * self._swiglu(f"{prefix}.mlp.experts.{expert}", x[token])
            rows.append(row)
        return torch.stack(rows)

    def _swiglu(self, name: str, x: Tensor) -> Tensor:
        gate = self._linear(x, f"{name}.gate_proj")
        return self._linear(
            gate * gate.sigmoid() * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    def _attention(self, prefix: str, x: Tensor) -> Tensor:
        config = self.config
        size = config["head_dim"]
        num_heads = config["num_attention_heads"]
        name = f"{prefix}.self_attn"
        both = self._linear(x, f"{name}.q_proj").reshape(len(x), num_heads, 2, size)
        queries = self._rotated(self._norm(both[:, :, 0], f"{name}.q_norm"))
        gates = both[:, :, 1].sigmoid()
        keys = self._linear(x, f"{name}.k_proj").reshape(len(x), -1, size)
        keys = self._rotated(self._norm(keys, f"{name}.k_norm"))
        values = self._linear(x, f"{name}.v_proj").reshape(len(x), -1, size)

        outputs = []
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        for head in range(num_heads):
            kv = head * keys.shape[1] // num_heads
            scores = queries[:, head] @ keys[:, kv].T / size**0.5
            weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
            outputs.append(weights @ values[:, kv] * gates[:, head])
        return self._linear(torch.cat(outputs, dim=-1), f"{name}.o_proj")

    def _rotated(self, x: Tensor) -> Tensor:
        """Turns the first elements of each head, in halves, by the angle of the position."""
        rope = self.config["rope_parameters"]
        size = int(x.shape[-1] * rope["partial_rotary_factor"])
        half = size // 2
        rates = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) * 2 / size)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * rates
        first = x[..., :half]
        second = x[..., half:size]
        return torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
                x[..., size:],
            ],
            dim=-1,
        )

    def _delta_net(self, prefix: str, x: Tensor) -> Tensor:
        config = self.config
        name = f"{prefix}.linear_attn"
        num_keys = config["linear_num_key_heads"]
        num_values = config["linear_num_value_heads"]
        key_size = config["linear_key_head_dim"]
        value_size = config["linear_value_head_dim"]
        share = num_values // num_keys
        queries, keys, values, gates, betas, alphas = self._projections(name, x)

        channels = torch.cat([part.flatten(1) for part in (queries, keys, values)], dim=1)
        channels = self._convolution(channels, self.named[f"{name}.conv1d.weight"][:, 0])
        split = [num_keys * key_size, num_keys * key_size, num_values * value_size]
        queries, keys, values = torch.split(channels, split, dim=1)
        queries = queries.reshape(len(x), num_keys, key_size)
        keys = keys.reshape(len(x), num_keys, key_size)
        values = values.reshape(len(x), num_values, value_size)

        outputs = []
        for head in range(num_values):
            rate = self.named[f"{name}.A_log"][head].exp()
            step = torch.nn.functional.softplus(
                alphas[:, head] + self.named[f"{name}.dt_bias"][head]
            )
            output = delta_rule(
                _direction(queries[:, head // share]) / key_size**0.5,
                _direction(keys[:, head // share]),
                values[:, head],
                (-rate * step).exp(),
                betas[:, head].sigmoid(),
            )
            gate = gates[:, head]
            normed = self._unit(output) * self.named[f"{name}.norm.weight"]
            outputs.append(normed * gate * gate.sigmoid())
        return self._linear(torch.cat(outputs, dim=-1), f"{name}.out_proj")

    def _projections(self, name: str, x: Tensor) -> list[Tensor]:
        """Queries, keys, values, gates [t, heads, size]; betas and alphas [t, heads]."""
        config = self.config
        num_keys = config["linear_num_key_heads"]
        num_values = config["linear_num_value_heads"]
        key_size = config["linear_key_head_dim"]
        value_size = config["linear_value_head_dim"]
        if config["model_type"] == "qwen3_next":
            share = num_values // num_keys
            wide = self._linear(x, f"{name}.in_proj_qkvz").reshape(len(x), num_keys, -1)
            parts = list(torch.split(wide, [key_size, key_size, *2 * [share * value_size]], dim=2))
            narrow = self._linear(x, f"{name}.in_proj_ba").reshape(len(x), num_keys, 2, share)
            parts += [narrow[:, :, 0], narrow[:, :, 1]]
        else:
            split = [num_keys * key_size, num_keys * key_size, num_values * value_size]
            parts = list(torch.split(self._linear(x, f"{name}.in_proj_qkv"), split, dim=1))
            parts += [self._linear(x, f"{name}.in_proj_{part}") for part in "zba"]
        shapes = [(num_keys, key_size)] * 2 + [(num_values, value_size)] * 2 + [(num_values,)] * 2
        return [part.reshape(len(x), *shape) for part, shape in zip(parts, shapes, strict=True)]

    def _convolution(self, x: Tensor, kernels: Tensor) -> Tensor:
        """SiLU of a weighted sum over the token and those before it. [t, channels]"""
        width = kernels.shape[1]
        rows = []
        for token in range(len(x)):
            row = torch.zeros_like(x[0])
            for back in range(min(width, token + 1)):
                row = row + x[token - back] * kernels[:, width - 1 - back]
            rows.append(row * row.sigmoid())
        return torch.stack(rows)


def _direction(x: Tensor) -> Tensor:
    """`x` with length 1."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class HybridTrainer(PlainTrainer):
    """The plain training loop with this model, in float64."""

    def __init__(self, folder: Path, *, clip: float = 1.0, temperature: float = 1.0) -> None:
        self.model: Any = HybridReference(folder)
        self.clip = clip
        self.temperature = temperature
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=OPTIMIZER["lr"],
            betas=(0.9, 0.95),
            eps=OPTIMIZER["adam_eps"],
            weight_decay=0.0,
        )

    def weights(self) -> dict[str, np.ndarray]:
        return {name: tensor.detach().numpy().copy() for name, tensor in self.model.named.items()}
