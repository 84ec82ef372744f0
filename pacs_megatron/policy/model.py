"""Builds Megatron model chunks, wrapped in DistributedDataParallel, from a ModelSpec and a layout.

Also has a norm and an attention for models without Transformer Engine: Megatron's torch norm does
not support sequence parallelism, and its local attention does not support packed (THD) input.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from pacs_megatron.config.schema import (
    RECOMPUTED_WITH_TRANSFORMER_ENGINE,
    ParallelOptions,
    PrecisionOptions,
)
from pacs_megatron.errors import ConfigError
from pacs_megatron.models import DeltaSpec, ModelSpec
from pacs_megatron.models.config_reader import BETA_FAST, BETA_SLOW
from pacs_megatron.parallel import cpu_redirects
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.policy import precision
from pacs_megatron.policy.head import LossGradient, token_certainties, token_logprobs
from pacs_megatron.policy.token_replay import TokenReplay
from pacs_megatron.runtime.environment import Version, version_text

_FIRST_HYBRID: Version = (0, 19)
"""Oldest Megatron-Core whose gated delta nets take packed sequences"""
_MAX_PADDING_FACTOR = 2.0
"""The attention pads sequences to one batch if this multiplies the tokens by at most this factor.
Otherwise it makes one call for each sequence.
"""


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019).

    Its gradient is summed over a sequence-parallel group.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **_unused: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters with this attribute over the tensor-parallel
        # ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def scale(self) -> Tensor:
        """[hidden], the factor of each element."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.scale(), self.eps)


class ZeroCentredRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, as hybrids have it.

    The weight stays as in Hugging Face: adding 1 to a bf16 weight would round it.
    """

    def scale(self) -> Tensor:
        return 1.0 + self.weight.float()

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.scale(), self.eps).to(x.dtype)


def norm_with_fp32_output(norm: type, *, zero_centred: bool) -> type:
    """A class that builds `norm` with an fp32 output, for `precision.head: fp32`.

    With `zero_centred` it multiplies by 1 + weight.

    Only the forward pass differs: the module's class, parameters and state are those of `norm`.
    """

    # Megatron builds a module by calling a class, and returns a function uncalled. A subclass of
    # `norm` is not possible: Megatron's TENorm constructs a module of another class.
    class Fp32Output:
        def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
            module = norm(config=config, hidden_size=hidden_size, eps=eps)

            def forward(x: Tensor) -> Tensor:
                scale = module.weight.float()
                if zero_centred:
                    scale = 1.0 + scale
                return F.rms_norm(x.float(), (hidden_size,), scale, eps)

            module.forward = forward
            return module

    return Fp32Output


def zigzag_index(bounds: Sequence[int], cp: int) -> Tensor:
    """The positions of each context-parallel rank, in Transformer Engine's order.

    A sequence of length L, a multiple of 2 cp, is split into 2 cp chunks. Rank r has the chunks r
    and 2 cp - 1 - r, so causal attention costs every rank the same.

    Args:
        bounds: [sequences + 1], the start of each packed sequence, and the end of the last one.
        cp: number of context-parallel ranks.

    Returns:
        int64 [cp, t / cp], positions among the t packed tokens, in the local order of each rank.
    """
    shares: list[list[Tensor]] = [[] for _ in range(cp)]
    for start, stop in itertools.pairwise(bounds):
        assert (stop - start) % (2 * cp) == 0, "sequences are padded to a multiple of 2 cp"
        if stop == start:
            continue
        chunks = torch.arange(start, stop).chunk(2 * cp)
        for rank in range(cp):
            shares[rank] += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.stack([torch.cat(share) for share in shares])


class _GatherSequence(torch.autograd.Function):
    """`gather_sequence` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        index: Tensor,
        group: dist.ProcessGroup,
    ) -> Tensor:
        shares = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(shares, local.contiguous(), group=group)
        full = local.new_empty(index.numel(), *local.shape[1:])
        for rank, share in enumerate(shares):
            full[index[rank]] = share
        ctx.save_for_backward(index)
        ctx.group = group
        return full

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[index[ctx.group.rank()]], None, None


def gather_sequence(local: Tensor, index: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The tokens of all context-parallel ranks. Collective, also in the backward pass.

    Differentiable: the backward pass sums the gradients over the ranks and takes the local part.

    Args:
        local: [t / cp, ...], this rank's tokens.
        index: int64 [cp, t / cp], of `zigzag_index`.
        group: context-parallel group.

    Returns:
        [t, ...], in packed order, the same on every rank.
    """
    full: Tensor = _GatherSequence.apply(local, index, group)  # type: ignore[no-untyped-call]
    return full


class PackedAttention(MegatronModule):
    """Causal attention over packed sequences with torch's scaled_dot_product_attention.

    With context parallelism every rank gathers and computes the whole sequence. This CPU path is
    exact, not efficient. On a GPU, Transformer Engine passes keys and values around the ring.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.cp_group = parallel_state.get_context_parallel_group()

    def forward(  # noqa: PLR0913
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attends within each sequence.

        Args:
            query: [t, heads, d], this rank's packed tokens.
            key: [t, kv heads, d].
            value: [t, kv heads, d].
            attention_mask: unused; the attention is causal.
            attn_mask_type: unused.
            attention_bias: unused.
            packed_seq_params: `cu_seqlens_q` has the bounds of the sequences, over all
                context-parallel ranks.

        Returns:
            [t, heads * d].
        """
        assert packed_seq_params is not None, "the policy always packs"
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        cp = self.cp_group.size()
        if cp > 1:
            index = zigzag_index(bounds, cp).to(query.device)
            query = gather_sequence(query, index, self.cp_group)
            key = gather_sequence(key, index, self.cp_group)
            value = gather_sequence(value, index, self.cp_group)

        lens = [stop - start for start, stop in itertools.pairwise(bounds)]
        num_padded = len(lens) * max(lens)
        if num_padded <= _MAX_PADDING_FACTOR * bounds[-1]:
            out = self._padded(query, key, value, lens)
        else:
            out = self._one_by_one(query, key, value, lens)

        if cp > 1:
            out = out.index_select(0, index[self.cp_group.rank()])
        return out.reshape(out.shape[0], -1)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, lens: list[int]) -> Tensor:
        """Attends in one call for all sequences. [t, heads, d], as `query`.

        Padding follows each sequence, so the causal mask hides it.
        """
        num = len(lens)
        longest = max(lens)
        slots = [torch.arange(length) + k * longest for k, length in enumerate(lens)]
        slot = torch.cat(slots).to(query.device)

        def pad(x: Tensor) -> Tensor:
            """[t, heads, d] -> [sequences, heads, longest, d]"""
            padded = x.new_zeros(num * longest, *x.shape[1:]).index_copy(0, slot, x)
            return padded.view(num, longest, *x.shape[1:]).transpose(1, 2)

        out = self._attend(pad(query), pad(key), pad(value)).transpose(1, 2)
        return out.reshape(num * longest, *query.shape[1:]).index_select(0, slot)

    def _one_by_one(self, query: Tensor, key: Tensor, value: Tensor, lens: list[int]) -> Tensor:
        """Attends in one call for each sequence. [t, heads, d], as `query`."""

        def split(x: Tensor) -> Sequence[Tensor]:
            """[t, heads, d] -> [1, heads, length, d] for each sequence"""
            return torch.split(x.transpose(0, 1).unsqueeze(0), lens, dim=2)

        parts = []
        for queries, keys, values in zip(split(query), split(key), split(value), strict=True):
            if queries.numel():
                parts.append(self._attend(queries, keys, values))
        return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[sequences, heads, length, d] from such queries and from keys and values of kv heads."""
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=is_grouped
        )


class PolicyModel(GPTModel):
    """Megatron's GPTModel whose last stage returns log-probs of given tokens instead of all logits.

    `labels`, int64 [1, t], has the token id that each position predicts, or -1 for none. The
    forward pass returns fp32 (log-probs [k], entropies [k]) of the k positions with a label, in
    order; that of a critic returns (values [k], zeros [k]). Without labels it behaves as GPTModel.
    """

    spec: ModelSpec
    temperature: float = 1.0
    want_entropy: bool = False
    want_certainty: bool = False
    """Also return certainties and logits; without gradient only"""
    loss_gradient: LossGradient | None = None
    """of the next forward pass, if it is known before the pass; see `token_logprobs`"""
    on_microbatch: Callable[[], None] | None = None
    """called before the forward pass of every micro-batch"""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states, *args, **kwargs)
        _await_parameters(self.output_layer)
        if self.spec.head == "value":
            return self._values(hidden_states, labels[0])

        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight

        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden_states)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)

        predicting = (labels[0] >= 0).nonzero()[:, 0]
        head: Callable[..., tuple[Tensor, ...]] = token_certainties
        if not self.want_certainty:
            head = functools.partial(token_logprobs, loss_gradient=self.loss_gradient)
        return head(
            hidden[:, 0].index_select(0, predicting),
            weight,
            labels[0].index_select(0, predicting),
            vocab_size=self.spec.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            temperature=self.temperature,
            want_entropy=self.want_entropy,
        )

    def _values(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The values of a critic.

        Args:
            hidden: [t, 1, hidden], final hidden states; with sequence parallelism this rank's part.
            labels: int64 [t], -1 for positions without a value.

        Returns:
            [k], fp32, the value before each of the k tokens.
            [k], fp32, zeros in place of entropies.
        """
        if self.config.sequence_parallel:
            # Every tensor-parallel rank computes the whole loss, so each takes its part of the
            # gradient.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False
            )
        predicting = (labels >= 0).nonzero()[:, 0]
        features = hidden[:, 0].index_select(0, predicting)
        head = self.output_layer
        values = F.linear(features.float(), head.weight.float(), head.bias.float())[:, 0]
        return values, torch.zeros_like(values)


def _await_parameters(module: torch.nn.Module | None) -> None:
    """Waits for the gather of a module's parameters, which `overlap_param_gather` starts early.

    Megatron's DDP waits in a hook before the module's own forward, but the head reads the weight
    without one.
    """
    if module is None:  # the head of tied embeddings on a single stage
        return
    for hook in module._forward_pre_hooks.values():
        hook(module, ())


def transformer_config(
    spec: ModelSpec,
    parallel: ParallelOptions,
    options: PrecisionOptions,
    machine: precision.Machine,
) -> TransformerConfig:
    """Megatron's config for this model, layout and precision.

    Raises:
        ConfigError: if Transformer Engine or Megatron-Core does not support the options.
    """
    dtype = precision.weight_dtype(options)
    arguments: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "qk_layernorm": spec.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "sequence_parallel": parallel.sequence_parallel,
        # Packed micro-batches differ in length.
        "variable_seq_lengths": True,
        # Plain sums: no division by micro-batches, tokens or data-parallel ranks. The objective
        # applies every factor.
        "calculate_per_token_loss": True,
    }
    if spec.moe is not None:
        uses_te = precision.uses_transformer_engine(dtype, machine)
        arguments |= {
            "num_moe_experts": spec.moe.num_experts,
            "moe_ffn_hidden_size": spec.moe.expert_ffn_size,
            "moe_router_topk": spec.moe.top_k,
            "moe_router_pre_softmax": not spec.moe.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_enable_routing_replay": True,
            # fp32 routing scores: rounding differences between two passes could select another
            # expert.
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": uses_te,
            # Otherwise a GPU adds the experts' outputs of a token with atomics in bf16: two equal
            # passes differ, and so do the scores.
            "moe_permute_fusion": uses_te,
            "moe_shared_expert_intermediate_size": spec.moe.shared_ffn_size or None,
            "moe_shared_expert_gate": spec.moe.shared_ffn_size > 0,
        }
    if spec.delta is not None:
        arguments |= _hybrid_arguments(spec.delta, machine)
    if parallel.vpp is not None:
        # The interleaved schedule's batched exchange mismatches sends and receives if both
        # neighbours are the same rank (pp = 2). One direction at a time works for any pp.
        arguments |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}

    precision.check_kernels(parallel.megatron, dtype, machine)
    arguments |= _recompute_arguments(parallel, machine)
    arguments |= precision.megatron_arguments(options, machine)
    arguments |= precision.megatron_options(TransformerConfig, parallel.megatron, machine, dtype)
    is_yarn = spec.rope_scaling is not None and spec.rope_scaling["rope_type"] == "yarn"
    if is_yarn:
        arguments["apply_rope_fusion"] = False  # Transformer Engine's kernel has no factor
    try:
        config = TransformerConfig(**arguments)
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"Megatron-Core does not support this combination of parallel.* options: {error}"
        ) from error
    if is_yarn:
        _set_yarn(config, spec.rope_scaling or {})
    return config


def _hybrid_arguments(delta: DeltaSpec, machine: precision.Machine) -> dict[str, Any]:
    """Keyword arguments of TransformerConfig for a hybrid.

    Raises:
        ConfigError: if Megatron-Core or the GPU's software has no gated delta net.
    """
    if machine.megatron < _FIRST_HYBRID:
        raise ConfigError(
            f"a model with gated delta nets needs Megatron-Core {version_text(_FIRST_HYBRID)}, "
            f"this environment has {version_text(machine.megatron)}; use Python 3.12 or 3.13, "
            "whose locked versions have it"
        )
    if machine.cuda and not machine.linear_attention:
        raise ConfigError(
            "a model with gated delta nets needs flash-linear-attention on a GPU, which is not "
            "installed; install it with `make install-gpu`"
        )
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(has_delta_net) for has_delta_net in delta.layers],
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_head_dim,
        "linear_value_head_dim": delta.value_head_dim,
        "linear_conv_kernel_dim": delta.conv_kernel,
        "attention_output_gate": True,
        # Read by Transformer Engine's norms; the local ones are built by class.
        "layernorm_zero_centered_gamma": True,
    }


def _recompute_arguments(parallel: ParallelOptions, machine: precision.Machine) -> dict[str, Any]:
    """Keyword arguments of TransformerConfig for `parallel.recompute`."""
    recompute = parallel.recompute
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }

    without_te = set(recompute.modules) & RECOMPUTED_WITH_TRANSFORMER_ENGINE
    if machine.transformer_engine is None and without_te:
        raise ConfigError(
            f"parallel.recompute.modules: {', '.join(sorted(without_te))} needs Transformer "
            "Engine, which is not installed; remove it, or install it with `make install-gpu`"
        )
    return {
        "recompute_granularity": recompute.granularity,
        "recompute_modules": list(recompute.modules),
    }


def _layer_spec(
    spec: ModelSpec,
    *,
    transformer_engine: bool,
    has_delta_net: bool = False,
    has_adapters: bool = False,
) -> ModuleSpec:
    """Megatron's spec of one layer, with Transformer Engine's modules or with local ones.

    With `has_delta_net` the layer has a gated delta net in the place of the attention. With
    `has_adapters` no norm is fused with a linear layer, because an adapter has the layer's input.
    """
    layer = _attention_layer_spec(spec, transformer_engine=transformer_engine)
    if has_adapters and transformer_engine:
        _separate_norms(layer, is_dense=spec.moe is None)
    if has_delta_net:
        # Megatron-Core 0.16 has no such module.
        from pacs_megatron.policy import gated_delta

        gated_delta.replace_attention(layer, transformer_engine=transformer_engine)
    return layer


def _separate_norms(layer: ModuleSpec, *, is_dense: bool) -> None:
    """Replaces Transformer Engine's linear layers that contain the norm before them."""
    layer.submodules.input_layernorm = te_extension.TENorm
    attention = layer.submodules.self_attention.submodules
    attention.linear_qkv = te_extension.TEColumnParallelLinear
    if is_dense:
        layer.submodules.pre_mlp_layernorm = te_extension.TENorm
        mlp = layer.submodules.mlp
        # Megatron-Core 0.16 has a ModuleSpec here, 0.19 a partial with the same submodules.
        of_mlp = mlp.keywords["submodules"] if hasattr(mlp, "keywords") else mlp.submodules
        of_mlp.linear_fc1 = te_extension.TEColumnParallelLinear


def _attention_layer_spec(spec: ModelSpec, *, transformer_engine: bool) -> ModuleSpec:
    """The spec of a layer with attention."""
    num_experts = None if spec.moe is None else spec.moe.num_experts
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=spec.moe is not None,
            qk_layernorm=spec.qk_norm,
        )

    local = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=num_experts,
            qk_layernorm=spec.qk_norm,
            normalization="RMSNorm",
        )
    )
    attention = local.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    norm = _local_norm(spec)
    local.submodules.input_layernorm = norm
    local.submodules.pre_mlp_layernorm = norm
    if spec.qk_norm:
        attention.q_layernorm = norm
        attention.k_layernorm = norm
    if spec.moe is not None:
        # With experts Transformer Engine does not fuse this norm, so its checkpoints use the norm's
        # own name.
        del local.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return local


def _local_norm(spec: ModelSpec) -> type[RMSNorm]:
    """The norm of the residual stream and of attention heads, without Transformer Engine."""
    return RMSNorm if spec.delta is None else ZeroCentredRMSNorm


def _block_spec(
    spec: ModelSpec,
    config: TransformerConfig,
    machine: precision.Machine,
    vp_stage: int | None,
    *,
    fp32_head: bool,
    has_adapters: bool,
) -> Any:
    """Megatron's spec of a chunk's layers and of the model's final norm."""
    transformer_engine = precision.uses_transformer_engine(config.params_dtype, machine)
    layer = _layer_spec(spec, transformer_engine=transformer_engine, has_adapters=has_adapters)
    if transformer_engine and not fp32_head and spec.delta is None:
        return layer

    norm: Any = te_extension.TENorm if transformer_engine else _local_norm(spec)
    if fp32_head:
        norm = norm_with_fp32_output(norm, zero_centred=spec.delta is not None)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [layer] * num_layers
    if spec.delta is not None:
        delta_layer = _layer_spec(spec, transformer_engine=transformer_engine, has_delta_net=True)
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        for index, has_delta_net in enumerate(spec.delta.layers[first : first + num_layers]):
            if has_delta_net:
                layers[index] = delta_layer
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def rope_frequencies(spec: ModelSpec) -> Tensor:
    """Angular frequencies of the rotary position embedding (Su et al. 2021), with its scaling.

    `linear` divides every frequency by the factor (position interpolation, Chen et al. 2023).
    `llama3` divides only those of long wavelengths, with a linear transition (Llama 3.1). `yarn`
    divides those of few rotations in the original context (Peng et al., arXiv:2309.00071).

    Returns:
        [rotated elements of a head / 2], fp32, radians a position.
    """
    rotary_dim = spec.rotary_dim or spec.head_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies

    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return frequencies / factor
    if scaling["rope_type"] == "yarn":
        return _yarn_frequencies(frequencies, spec.rope_theta, scaling)

    low = float(scaling["low_freq_factor"])
    high = float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * torch.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)


def _yarn_frequencies(frequencies: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Frequencies between those of YaRN's two limits are blended, linearly by dimension.

    Args:
        frequencies: [rotated elements of a head / 2], without scaling.
        theta: their base.
        scaling: of a ModelSpec.
    """
    original = float(scaling["original_max_position_embeddings"])
    count = len(frequencies)

    def dimension_of(rotations: float) -> float:
        """The dimension, not rounded, that makes as many rotations in the original context."""
        return count * math.log(original / (2 * math.pi * rotations)) / math.log(theta)

    low = dimension_of(float(scaling.get("beta_fast", BETA_FAST)))
    high = dimension_of(float(scaling.get("beta_slow", BETA_SLOW)))
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * count - 1)
    width = (high - low) or 1e-3
    divided = ((torch.arange(count, dtype=torch.float32) - low) / width).clamp(0, 1)
    return frequencies * (divided / float(scaling["factor"]) + 1 - divided)


def _set_yarn(config: TransformerConfig, scaling: Mapping[str, Any]) -> None:
    """Megatron's attention multiplies sines and cosines by a factor of these attributes."""
    names = {
        "yarn_rotary_scaling_factor": "factor",
        "yarn_mscale": "mscale",
        "yarn_mscale_all_dim": "mscale_all_dim",
    }
    for attribute, key in names.items():
        setattr(config, attribute, scaling.get(key))


def build_chunks(  # noqa: PLR0913  (the last two are keyword-only)
    spec: ModelSpec,
    padded_vocab: int,
    config: TransformerConfig,
    machine: precision.Machine,
    rank: Rank,
    *,
    fp32_head: bool = False,
    has_adapters: bool = False,
) -> list[torch.nn.Module]:
    """This rank's model chunks (one, or `vpp`) on its device, with arbitrary weights.

    Args:
        spec: the model.
        padded_vocab: rows of the embedding, padded ones included.
        config: of `transformer_config`.
        machine: this rank's accelerator software.
        rank: this rank.
        fp32_head: whether the final norm, the output layer and the log-softmax compute in fp32 in a
            model with bf16 weights.
        has_adapters: whether linear layers get adapters.

    Returns:
        A PolicyModel for each chunk; with bf16 weights inside a Float16Module.
    """
    # megatron-core 0.16: the router tests `te_general_gemm is not None`, a NameError without
    # Transformer Engine.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Megatron's output layer rejects the fused weight gradient without Apex's kernel. This layer
    # computes no gradient, because the head reads its weight. Transformer Engine's layers have
    # their own kernel, and without one `check_kernels` rejects the option.
    layers._grad_accum_fusion_available = True

    vpp = config.virtual_pipeline_model_parallel_size
    vp_stages: Sequence[int | None] = range(vpp) if vpp else [None]
    chunks: list[torch.nn.Module] = []
    for vp_stage in vp_stages:
        block = _block_spec(
            spec, config, machine, vp_stage, fp32_head=fp32_head, has_adapters=has_adapters
        )
        model = _build_model(spec, padded_vocab, config, block, vp_stage)
        model.rotary_pos_emb.inv_freq = rope_frequencies(spec).to(rank.device)
        model.to(rank.device)
        chunks.append(Float16Module(config, model) if config.bf16 else model)
    return chunks


def _build_model(
    spec: ModelSpec,
    padded_vocab: int,
    config: TransformerConfig,
    block: Any,
    vp_stage: int | None,
) -> PolicyModel:
    """One chunk, with the attributes that the policy needs."""
    ignore_virtual = vp_stage is None
    with cpu_redirects.cuda_type_names():
        model = PolicyModel(
            config,
            block,
            vocab_size=padded_vocab,
            max_sequence_length=spec.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=ignore_virtual, vp_stage=vp_stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=ignore_virtual, vp_stage=vp_stage
            ),
            share_embeddings_and_output_weights=spec.tied,
            parallel_output=True,
            vp_stage=vp_stage,
            position_embedding_type="rope",
            rotary_base=spec.rope_theta,  # `build_chunks` scales the frequencies
        )
    if spec.moe is not None:
        for layer in model.decoder.layers:
            layer.mlp.router.router_replay = TokenReplay()
        _forget_routes(model)
    # `Routing` uses each router's own instance.
    RouterReplay.clear_global_router_replay_instances()

    model.spec = spec
    model.model_type = ModelType.encoder_or_decoder
    if spec.head == "value" and model.post_process:
        model.output_layer = torch.nn.Linear(spec.hidden_size, 1, dtype=config.params_dtype)
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model


def _forget_routes(model: torch.nn.Module) -> None:
    """Lets every all-to-all dispatcher drop its routing after its last use.

    Megatron-Core 0.16 to 0.19 keep it until the layer's next forward pass. The router's
    probabilities of a recomputed forward keep its graph, and with it the layer's input and its
    gradient, in every layer at once. The order of the tokens has two integers for each token and
    expert. The dispatcher reads them in the combination for the last time.
    """
    for module in model.modules():
        dispatcher: Any = getattr(module, "token_dispatcher", None)
        if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
            dispatcher.combine_postprocess = functools.partial(
                _combine_and_forget, dispatcher, dispatcher.combine_postprocess
            )


def _combine_and_forget(dispatcher: Any, combine: Any, hidden: Tensor) -> Any:
    combined = combine(hidden)
    dispatcher.probs = None
    dispatcher.routing_map = None
    dispatcher.reversed_local_input_permutation_mapping = None
    return combined


def wrap_for_training(
    chunks: list[torch.nn.Module],
    config: TransformerConfig,
    parallel: ParallelOptions,
    machine: precision.Machine,
) -> list[DistributedDataParallel]:
    """The chunks in Megatron's DDP with fp32 gradient buffers.

    `calculate_per_token_loss` makes its reduction a sum instead of a mean.
    """
    options = precision.megatron_options(
        DistributedDataParallelConfig, parallel.megatron, machine, config.params_dtype
    )
    options["overlap_param_gather"] &= parallel.distributed_optimizer
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=parallel.distributed_optimizer,
        average_in_collective=False,
        **options,
    )

    overlap = ddp_config.overlap_grad_reduce
    wrapped = []
    for index, chunk in enumerate(chunks):
        disable_bucketing = index > 0 and not overlap
        wrapped.append(
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=disable_bucketing)
        )

    if overlap:
        # Gradients are reduced in the backward pass of the last micro-batch only.
        no_sync = [chunk.no_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def unwrap(chunk: torch.nn.Module) -> PolicyModel:
    """The PolicyModel inside DDP and Float16Module."""
    inner: Any = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    assert isinstance(inner, PolicyModel)
    return inner
