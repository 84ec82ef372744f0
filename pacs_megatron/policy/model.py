"""Builds Megatron model chunks, wrapped in DistributedDataParallel, from a ModelSpec and a layout.

Also has a norm and an attention for models without Transformer Engine: Megatron's torch norm does
not support sequence parallelism, and its local attention does not support packed (THD) input.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.models.common.embeddings import rope_utils
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
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pacs_megatron.config.schema import (
    RECOMPUTED_WITH_TRANSFORMER_ENGINE,
    ParallelOptions,
    PrecisionOptions,
)
from pacs_megatron.errors import ConfigError
from pacs_megatron.models import ModelSpec
from pacs_megatron.parallel import cpu_redirects
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.policy import precision
from pacs_megatron.policy.head import LossGradient, token_logprobs

_MAX_PADDING_FACTOR = 2.0
"""Sequences are padded to one batch if that multiplies the tokens by at most this factor; otherwise
one call each.
"""


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension; its gradient is summed over a
    sequence-parallel group.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters with this attribute over the tensor-parallel
        # ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def with_fp32_output(norm: type) -> type:
    """The final norm of `precision.head: fp32`:

    Megatron's `norm` with its parameters and state; the output is fp32.
    """

    class Fp32Output:
        def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
            module = norm(config=config, hidden_size=hidden_size, eps=eps)
            module.forward = lambda x: F.rms_norm(
                x.float(), (hidden_size,), module.weight.float(), eps
            )
            return module

    return Fp32Output


# Context parallelism splits every packed sequence over the ranks in Transformer Engine's order. A
# sequence of length L (a multiple of 2 cp) is split into 2 cp chunks; rank r has chunks r and 2 cp
# - 1 - r, so causal attention costs every rank the same.
def zigzag_index(bounds: Sequence[int], cp: int) -> Tensor:
    """int64 [cp, t / cp]: positions of each rank, in its local order, of sequences with bounds [n +
    1].
    """
    shares: list[list[Tensor]] = [[] for _ in range(cp)]
    for start, stop in itertools.pairwise(bounds):
        chunks = torch.arange(start, stop).chunk(2 * cp)
        assert (stop - start) % (2 * cp) == 0, "sequences are padded to a multiple of 2 cp"
        if stop == start:
            continue
        for rank in range(cp):
            shares[rank] += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.stack([torch.cat(share) for share in shares])


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, index: Tensor, group: dist.ProcessGroup) -> Tensor:
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
    """[t / cp, ...] of every rank -> [t, ...] in packed order; `index` of `zigzag_index`.

    Collective; differentiable: backward sums over the ranks and takes the local part.
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

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [t, heads, d], key and value [t, kv heads, d] -> [t, heads * d]; bounds of
        sequences: `cu_seqlens_q`.
        """
        assert packed_seq_params is not None, "the policy always packs"
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        cp = self.cp_group.size()
        if cp > 1:
            index = zigzag_index(bounds, cp).to(query.device)
            query, key, value = (
                gather_sequence(x, index, self.cp_group) for x in (query, key, value)
            )
        lens = [stop - start for start, stop in itertools.pairwise(bounds)]
        if len(lens) * max(lens) <= _MAX_PADDING_FACTOR * bounds[-1]:
            out = self._padded(query, key, value, lens)
        else:
            split = (
                torch.split(x.transpose(0, 1).unsqueeze(0), lens, dim=2)
                for x in (query, key, value)
            )
            parts = [self._attend(*own) for own in zip(*split, strict=True) if own[0].numel()]
            out = torch.cat(parts, dim=2).squeeze(0).transpose(0, 1)
        if cp > 1:
            out = out.index_select(0, index[self.cp_group.rank()])
        return out.reshape(out.shape[0], -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
        )

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, lens: list[int]) -> Tensor:
        """Attends in one call for all sequences.

        Padding follows each sequence, so the causal mask hides it.
        """
        num = len(lens)
        longest = max(lens)
        slot = torch.cat([torch.arange(n) + k * longest for k, n in enumerate(lens)]).to(
            query.device
        )

        def pad(x: Tensor) -> Tensor:
            padded = x.new_zeros(num * longest, *x.shape[1:]).index_copy(0, slot, x)
            return padded.view(num, longest, *x.shape[1:]).transpose(1, 2)

        out = self._attend(pad(query), pad(key), pad(value)).transpose(1, 2)
        return out.reshape(num * longest, *query.shape[1:]).index_select(0, slot)


class PolicyModel(GPTModel):
    """Megatron's GPTModel whose last stage returns log-probs of given tokens instead of all logits.

    `labels` [1, t] has the token id that each position predicts, or -1 for none. Returns (log-probs
    [k], entropies [k]) of the k positions with a label, in order; a critic's are (values, zeros).
    Without labels it behaves as GPTModel.
    """

    spec: ModelSpec
    temperature: float = 1.0
    want_entropy: bool = False
    loss_gradient: LossGradient | None = None
    """of the next forward pass, if it is known before the pass; see `token_logprobs`"""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states, *args, **kwargs)
        if self.spec.head == "value":
            return self._values(hidden_states, labels[0])
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden_states)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)
        wanted = (labels[0] >= 0).nonzero()[:, 0]
        return token_logprobs(
            hidden[:, 0].index_select(0, wanted),
            weight,
            labels[0].index_select(0, wanted),
            vocab_size=self.spec.vocab_size,
            group=parallel_state.get_tensor_model_parallel_group(),
            temperature=self.temperature,
            want_entropy=self.want_entropy,
            loss_gradient=self.loss_gradient,
        )

    def _values(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(values [k], zeros [k]): the value before each token, in fp32."""
        if self.config.sequence_parallel:
            # Every tensor-parallel rank computes the whole loss, so each takes its part of the
            # gradient.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False
            )
        wanted = hidden[:, 0].index_select(0, (labels >= 0).nonzero()[:, 0])
        head = self.output_layer
        values = F.linear(wanted.float(), head.weight.float(), head.bias.float())[:, 0]
        return values, torch.zeros_like(values)


def transformer_config(
    spec: ModelSpec,
    parallel: ParallelOptions,
    options: PrecisionOptions,
    machine: precision.Machine,
) -> TransformerConfig:
    """Megatron's config for this model, layout and precision."""
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
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
            "moe_grouped_gemm": precision.uses_transformer_engine(dtype, machine),
        }
    if parallel.vpp is not None:
        # The interleaved schedule's batched exchange mismatches sends and receives if both
        # neighbours are the same rank (pp = 2). One direction at a time works for any pp.
        arguments |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    recompute = parallel.recompute
    if recompute.granularity != "none":
        arguments["recompute_granularity"] = recompute.granularity
    if recompute.granularity == "full":
        arguments |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    elif recompute.granularity == "selective":
        arguments["recompute_modules"] = list(recompute.modules)
        without_te = set(recompute.modules) & RECOMPUTED_WITH_TRANSFORMER_ENGINE
        if machine.transformer_engine is None and without_te:
            raise ConfigError(
                f"parallel.recompute.modules: {', '.join(sorted(without_te))} needs Transformer "
                "Engine, which is not installed; remove it, or install transformer-engine 2.11"
            )
    arguments |= precision.megatron_arguments(options, machine)
    arguments |= precision.megatron_options(TransformerConfig, parallel.megatron, machine, dtype)
    try:
        return TransformerConfig(**arguments)
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"Megatron-Core does not support this combination of parallel.* options: {error}"
        ) from error


def _layer_spec(spec: ModelSpec, *, transformer_engine: bool) -> ModuleSpec:
    num_experts = None if spec.moe is None else spec.moe.num_experts
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=spec.moe is not None,
            qk_layernorm=spec.qk_norm,
        )
    local = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=num_experts, qk_layernorm=spec.qk_norm, normalization="RMSNorm"
        )
    )
    attention = local.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    local.submodules.input_layernorm = local.submodules.pre_mlp_layernorm = RMSNorm
    if spec.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if spec.moe is not None:
        # With experts Transformer Engine does not fuse this norm, so its checkpoints use the norm's
        # own name.
        del local.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return local


def _block_spec(
    spec: ModelSpec,
    config: TransformerConfig,
    machine: precision.Machine,
    vp_stage: int | None,
    *,
    fp32_head: bool,
) -> Any:
    transformer_engine = precision.uses_transformer_engine(config.params_dtype, machine)
    layer = _layer_spec(spec, transformer_engine=transformer_engine)
    if transformer_engine and not fp32_head:
        return layer
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    norm: Any = te_extension.TENorm if transformer_engine else RMSNorm
    norm = with_fp32_output(norm) if fp32_head else norm
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def rope_frequencies(spec: ModelSpec) -> Tensor:
    """float32 [head_dim / 2], radians a position, with the family's scaling (linear or llama3)."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return frequencies / factor
    low = float(scaling["low_freq_factor"])
    high = float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * torch.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled)


def build_chunks(
    spec: ModelSpec,
    padded_vocab: int,
    config: TransformerConfig,
    machine: precision.Machine,
    rank: Rank,
    *,
    fp32_head: bool = False,
) -> list[torch.nn.Module]:
    """This rank's model chunks (one, or `vpp`) on its device, with arbitrary weights; bf16 ones in
    a Float16Module. `fp32_head`: final norm, output layer and log-softmax compute in fp32 in a
    model with bf16 weights.
    """
    # megatron-core 0.16: the router tests `te_general_gemm is not None`, a NameError without
    # Transformer Engine.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Megatron's output layer rejects the fused weight gradient without Apex's kernel. This layer
    # computes no gradient, because the head reads its weight. Transformer Engine's layers have
    # their own kernel.
    layers._grad_accum_fusion_available = True
    chunks: list[torch.nn.Module] = []
    vpp = config.virtual_pipeline_model_parallel_size
    for stage in range(vpp or 1):
        vp_stage = stage if vpp else None
        with cpu_redirects.cuda_type_names():
            model = PolicyModel(
                config,
                _block_spec(spec, config, machine, vp_stage, fp32_head=fp32_head),
                vocab_size=padded_vocab,
                max_sequence_length=spec.max_positions,
                pre_process=parallel_state.is_pipeline_first_stage(
                    ignore_virtual=vpp is None, vp_stage=vp_stage
                ),
                post_process=parallel_state.is_pipeline_last_stage(
                    ignore_virtual=vpp is None, vp_stage=vp_stage
                ),
                share_embeddings_and_output_weights=spec.tied,
                parallel_output=True,
                vp_stage=vp_stage,
                position_embedding_type="rope",
                rotary_base=spec.rope_theta,  # scaled below
            )
        # `Routing` uses each router's own instance.
        RouterReplay.clear_global_router_replay_instances()
        model.spec = spec
        if spec.head == "value" and model.post_process:
            model.output_layer = torch.nn.Linear(spec.hidden_size, 1, dtype=config.params_dtype)
        model.model_type = ModelType.encoder_or_decoder
        model.rotary_pos_emb.inv_freq = rope_frequencies(spec).to(rank.device)
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        model.to(rank.device)
        chunks.append(Float16Module(config, model) if config.bf16 else model)
    return chunks


def wrap_for_training(
    chunks: list[torch.nn.Module],
    config: TransformerConfig,
    parallel: ParallelOptions,
    machine: precision.Machine,
) -> list[DistributedDataParallel]:
    """Megatron's DDP with fp32 gradient buffers.

    Averaging is off: `calculate_per_token_loss` makes it a sum.
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
    wrapped = [
        DistributedDataParallel(
            config, ddp_config, chunk, disable_bucketing=index > 0 and not overlap
        )
        for index, chunk in enumerate(chunks)
    ]
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
