"""The models of `certify`'s reference: transformers in float64, one sample a forward.

It imports nothing of pacs_megatron.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CRITIC = "critic"
"""Name of the critic's folder, beside the policy's folder"""
ADAPTERS = "adapters"
"""Name of the folder of the first adapters, beside the policy's folder"""
TEACHER = "teacher"
"""Name of the teacher's folder, beside the policy's folder"""

Routes = list[Tensor | None]
"""The experts of each layer with experts, int64 [tokens, top k]; None: the router selects them"""


class Model:
    """A transformers model in float64: a policy, or a critic if its folder has that name.

    `named` gives parameters and their moments the names of a checkpoint.
    """

    def __init__(
        self, folder: Path, temperature: float, lora: Mapping[str, Any] | None = None
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

        kind = AutoModelForTokenClassification if folder.name == CRITIC else AutoModelForCausalLM
        self.model = kind.from_pretrained(
            folder,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
        ).eval()
        self.routers: list[_Router] = []
        for module in self.model.modules():
            if hasattr(module, "variance_epsilon"):
                _compute_norm_in_float64(module)
            elif type(module).__name__.endswith("RMSNorm"):
                _compute_zero_centred_norm_in_float64(module)
            if hasattr(module, "A_log"):
                module.forward = _DeltaNet(module)
            if type(module).__name__.endswith("TopKRouter"):
                self.routers.append(_Router(module))
        self.temperature = temperature
        self.parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        """those that are trained"""
        self.scale = 0.0
        """alpha / rank of the adapters; 0: none"""
        if lora is not None:
            self.scale = lora["alpha"] / lora["rank"]
            self.parameters = self._adapt(folder.with_name(ADAPTERS))
        self.certainty = torch.empty(0)
        """[response], nats, of the last sample"""
        self.token_logit = torch.empty(0)
        """[response], nats, logits of the last sample's tokens"""

    def sample(self, ids: np.ndarray, prompt_len: int, routes: Routes) -> tuple[Tensor, Tensor]:
        """The policy's log-probs and entropies of one sample's response, with graph.

        Args:
            ids: int32 [prompt + response].
            prompt_len: tokens of the prompt.
            routes: of each layer with experts.

        Returns:
            [response] each, nats.
        """
        logits = self._logits(ids, prompt_len, routes)
        distribution = torch.log_softmax(logits / self.temperature, dim=-1)
        tokens = torch.from_numpy(ids[prompt_len:].astype(np.int64))
        logprobs = distribution.gather(1, tokens[:, None])[:, 0]
        entropies = -(distribution.exp() * distribution).sum(-1)
        scaled = logits.detach() / self.temperature
        self.certainty = scaled.logsumexp(-1) - scaled.mean(-1)
        self.token_logit = scaled.gather(1, tokens[:, None])[:, 0]
        return logprobs, entropies

    def values(self, ids: np.ndarray, prompt_len: int) -> Tensor:
        """A critic's values before each token of one sample's response, [response], with graph.

        Its own router selects experts.
        """
        routes: Routes = [None] * len(self.routers)
        return self._logits(ids, prompt_len, routes)[:, 0]

    def chosen_routes(self) -> Routes:
        """The experts of the last forward pass."""
        return [router.chosen for router in self.routers]

    def _logits(self, ids: np.ndarray, prompt_len: int, routes: Routes) -> Tensor:
        """The output at the token before each response token, [response, outputs]."""
        for router, chosen in zip(self.routers, routes, strict=True):
            router.chosen = chosen
        tokens = torch.from_numpy(ids.astype(np.int64))
        logits: Tensor = self.model(tokens[None], use_cache=False).logits
        return logits[0, prompt_len - 1 : -1]

    def _adapt(self, folder: Path) -> dict[str, Tensor]:
        """Freezes the model and adds the term alpha / rank * B A x to each layer that has an A and
        a B in `folder` (Hu et al. 2021, section 4.1).

        Returns:
            A and B by PEFT's names.
        """
        self.model.requires_grad_(False)
        matrices = {}
        for name, values in load_file(folder / "adapter_model.safetensors").items():
            matrices[name] = values.double().requires_grad_()

        def add_term(prefix: str, _layer: Any, inputs: Any, output: Tensor) -> Tensor:
            low: Tensor = inputs[0] @ matrices[f"{prefix}.lora_A.weight"].T
            return output + self.scale * (low @ matrices[f"{prefix}.lora_B.weight"].T)

        for name, layer in self.model.named_modules():
            prefix = _peft_name(name)
            if f"{prefix}.lora_A.weight" in matrices:
                layer.register_forward_hook(partial(add_term, prefix))
        return matrices

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def weights(self) -> dict[str, Any]:
        """The trained parameters, and with adapters also the merged weights, as arrays."""
        arrays = self.named(self.parameters)
        if not self.scale:
            return arrays
        merged = {}
        for name, weight in self.model.named_parameters():
            prefix = _peft_name(name.removesuffix(".weight"))
            merged[name] = weight
            if f"{prefix}.lora_A.weight" in self.parameters:
                up = self.parameters[f"{prefix}.lora_B.weight"]
                down = self.parameters[f"{prefix}.lora_A.weight"]
                merged[name] = weight + self.scale * up @ down
        return arrays | self.named(merged)

    def named(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        """Parameters, or their moments, as arrays under the names of a checkpoint.

        transformers stacks the experts of a layer; a checkpoint has one tensor for each projection
        of each expert.
        """
        arrays: dict[str, Any] = {}
        for key, value in values.items():
            array = value.detach().numpy()
            base, _, projection = key.rpartition(".experts.")
            if not base:
                arrays[key] = array
                continue
            for number, expert in enumerate(array):
                for name, part in _projections(projection, expert).items():
                    arrays[f"{base}.experts.{number}.{name}.weight"] = part
        return arrays

    def copy(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def set(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])


def _projections(name: str, expert: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of one expert; transformers stacks gate and up."""
    if name == "down_proj":
        return {"down_proj": expert}
    gate, up = np.split(expert, 2)
    return {"gate_proj": gate, "up_proj": up}


def _compute_norm_in_float64(module: Any) -> None:
    """Replaces the forward of a transformers norm, which computes in float32."""
    module.forward = partial(
        torch.nn.functional.rms_norm,
        normalized_shape=module.weight.shape,
        weight=module.weight,
        eps=module.variance_epsilon,
    )


def _compute_zero_centred_norm_in_float64(module: Any) -> None:
    """Replaces the forward of a hybrid's norm, which computes in float32 and multiplies by
    1 + weight.
    """

    def forward(x: Tensor) -> Tensor:
        scale = 1 + module.weight
        return torch.nn.functional.rms_norm(x, module.weight.shape, scale, module.eps)

    module.forward = forward


class _DeltaNet:
    """A gated delta net in float64, token by token, for one sample.

    Source: Yang, Kautz and Hatamizadeh, arXiv:2412.06464. transformers computes it in float32.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, hidden_states: Tensor, **_unused: Any) -> Tensor:
        module = self.module
        queries, keys, values, gates, betas, alphas = self._projected(hidden_states[0])
        channels = torch.cat([part.flatten(1) for part in (queries, keys, values)], dim=1)
        channels = self._convolved(channels)
        split = [module.key_dim, module.key_dim, module.value_dim]
        queries, keys, values = (
            part.reshape(like.shape)
            for part, like in zip(
                torch.split(channels, split, dim=1), (queries, keys, values), strict=True
            )
        )
        # Each key head serves as many value heads.
        share = module.num_v_heads // module.num_k_heads
        queries = _unit(queries).repeat_interleave(share, dim=1) / module.head_k_dim**0.5
        keys = _unit(keys).repeat_interleave(share, dim=1)
        steps = torch.nn.functional.softplus(alphas + module.dt_bias)
        decays = (-module.A_log.exp() * steps).exp()

        state = values.new_zeros(module.num_v_heads, module.head_v_dim, module.head_k_dim)
        rows = []
        for token in range(len(queries)):
            query = queries[token, :, :, None]
            key = keys[token, :, :, None]
            state = decays[token, :, None, None] * state
            error = values[token, :, :, None] - state @ key
            state = state + betas[token].sigmoid()[:, None, None] * error @ key.mT
            rows.append((state @ query)[:, :, 0])
        normed = module.norm(torch.stack(rows)) * torch.nn.functional.silu(gates)
        found: Tensor = module.out_proj(normed.flatten(1))[None]
        return found

    def _projected(self, x: Tensor) -> list[Tensor]:
        """Queries, keys, values, gates, [t, heads, size]; betas and alphas, [t, heads]."""
        module = self.module
        key = module.head_k_dim
        value = module.head_v_dim
        if hasattr(module, "in_proj_qkvz"):
            # Interleaved by key head.
            share = module.num_v_heads // module.num_k_heads
            wide = module.in_proj_qkvz(x).reshape(len(x), module.num_k_heads, -1)
            narrow = module.in_proj_ba(x).reshape(len(x), module.num_k_heads, -1)
            parts = list(torch.split(wide, [key, key, share * value, share * value], dim=2))
            parts += torch.split(narrow, [share, share], dim=2)
        else:
            split = [module.key_dim, module.key_dim, module.value_dim]
            parts = list(torch.split(module.in_proj_qkv(x), split, dim=1))
            parts += [module.in_proj_z(x), module.in_proj_b(x), module.in_proj_a(x)]
        shapes = [(-1, key), (-1, key), (-1, value), (-1, value), (-1,), (-1,)]
        return [part.reshape(len(x), *shape) for part, shape in zip(parts, shapes, strict=True)]

    def _convolved(self, x: Tensor) -> Tensor:
        """SiLU of each channel's weighted sum over the last tokens, [t, channels]."""
        kernels = self.module.conv1d.weight[:, 0]
        width = kernels.shape[1]
        padded = torch.nn.functional.pad(x, (0, 0, width - 1, 0))
        total = torch.zeros_like(x)
        for tap in range(width):
            total = total + padded[tap : tap + len(x)] * kernels[:, tap]
        return torch.nn.functional.silu(total)


def _unit(x: Tensor) -> Tensor:
    """`x` with a last dimension of length 1."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class _Router:
    """The router of a layer with experts, in float64."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.chosen: Tensor | None = None
        """int64 [tokens, top k], the experts to use; None: the most likely ones, which a forward
        pass puts here"""
        module.forward = self

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x.reshape(-1, x.shape[-1]) @ self.module.weight.T
        probabilities = logits.softmax(-1)
        if self.chosen is None:
            self.chosen = probabilities.topk(self.module.top_k).indices

        weights = probabilities.gather(1, self.chosen)
        # Qwen3.5 always divides by the sum.
        if getattr(self.module, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, self.chosen


def _peft_name(module: str) -> str:
    """PEFT's name of a module."""
    return f"base_model.model.{module}"


def random_model(
    folder: Path, seed: int, *, objective: str, lora: Mapping[str, Any] | None = None
) -> None:
    """Writes random weights for the config.json in `folder`, and beside it those of the critic or
    the teacher of `objective`, and adapters; their range is wide enough to show errors.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    torch.manual_seed(seed)
    # save_pretrained writes a config.json of its own.
    config_text = (folder / "config.json").read_text()
    policy_config = AutoConfig.from_pretrained(folder)
    _write_random(AutoModelForCausalLM, policy_config, folder)
    if objective == "distill":
        _write_random(AutoModelForCausalLM, policy_config, folder.with_name(TEACHER))
    if objective == "ppo":
        critic_config = AutoConfig.from_pretrained(folder, num_labels=1)
        _write_random(AutoModelForTokenClassification, critic_config, folder.with_name(CRITIC))
    (folder / "config.json").write_text(config_text)
    if lora is not None:
        _write_adapters(folder, lora)


def _write_adapters(folder: Path, lora: Mapping[str, Any]) -> None:
    """Writes PEFT's folder for the model in `folder`, beside it: A is random, B is 0."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors = {}
    for name, layer in model.named_modules():
        is_expert = ".experts." in name
        if name.rpartition(".")[2] in lora["targets"] and not is_expert:
            outputs, inputs = layer.weight.shape
            down = torch.empty(lora["rank"], inputs).normal_(std=0.3)
            tensors[f"{_peft_name(name)}.lora_A.weight"] = down
            tensors[f"{_peft_name(name)}.lora_B.weight"] = torch.zeros(outputs, lora["rank"])

    target = folder.with_name(ADAPTERS)
    target.mkdir()
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "target_modules": list(lora["targets"]),
        "bias": "none",
    }
    (target / "adapter_config.json").write_text(json.dumps(config))


def _write_random(kind: Any, config: Any, folder: Path) -> None:
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                # Around the value of a new model: 1, or 0 where the norm multiplies by 1 + weight.
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
            else:
                parameter.normal_(std=0.12)
    model.save_pretrained(folder)
