"""The embedded rollout engine: sampling inside the ranks with Hugging Face `transformers`, for a
laptop and for tests.

Results are the same for any number of ranks, bit for bit. Requests are cut, in the given order,
into chunks of `batch_sequences`. Chunk i belongs to rank i % num_ranks and has the same shapes on
every rank; each sample has its own seed. All ranks need the same number of torch threads and the
same order of requests: both change how a matrix product is split, and with it the last bit of a
log-prob.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from pacs_megatron.config.rollout_options import EmbeddedRollout
from pacs_megatron.contracts import Interrupted, Sample, SampleRequest, Span, Stop
from pacs_megatron.contracts.samples import check_request
from pacs_megatron.data import stop_token_ids
from pacs_megatron.embedded.sampling import RowSampler
from pacs_megatron.embedded.weight_inbox import WeightInbox
from pacs_megatron.errors import RolloutError

ATTENTION = "pacs_grouped_queries"
"""name of `grouped_attention` in transformers"""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokenizer's data and functions that the engine needs."""

    eos_token_ids: frozenset[int]
    """Each of them ends a response and is its last token."""
    pad_token_id: int
    """any valid id; padding is masked"""
    decode: Callable[[Sequence[int]], str]
    """Token ids to text, with special tokens; used to find stop strings only."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, model_path: str) -> Vocabulary:
        """From a `transformers` tokenizer: its end tokens and those of the folder's
        generation_config.json.

        Raises DataError if there is no end token.
        """
        eos = stop_token_ids(tokenizer, model_path)
        pad = tokenizer.pad_token_id
        return cls(
            eos_token_ids=frozenset(eos),
            pad_token_id=eos[0] if pad is None else int(pad),
            decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        )


@dataclass(slots=True)
class _Rows:
    """The unfinished rows of a chunk; `keep` drops rows from all fields."""

    sampler: RowSampler
    stops: _StopStrings
    cache: DynamicCache
    number: torch.Tensor
    """int64 [b], row in the chunk"""
    mask: torch.Tensor
    """[b, 1, 1, columns], 0 or -inf, additive; all columns that the chunk can reach"""
    positions: torch.Tensor
    """int64 [b, 1], of the next token"""

    def keep(self, alive: torch.Tensor) -> None:
        """Drops all rows but `alive` (int64, increasing)."""
        self.sampler.keep(alive)
        self.stops.keep(alive)
        self.cache.batch_select_indices(alive)
        self.number = self.number[alive]
        self.mask = self.mask[alive]
        self.positions = self.positions[alive]


class EmbeddedEngine(WeightInbox):
    """Sampler and WeightReceiver in the calling process. Not thread-safe.

    Builds the module from config.json only. Receives weights through begin_update / put /
    end_update, as the policy exports them; sampling requires a complete update. Shares no memory
    with the policy.
    """

    def __init__(
        self,
        model_path: Path,
        options: EmbeddedRollout,
        vocabulary: Vocabulary,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        """`rank` of `num_ranks` samples every num_ranks-th chunk.

        Raises RolloutError for an unusable config.json.
        """
        self._options = options
        self._vocabulary = vocabulary
        self._rank = rank
        self._num_ranks = num_ranks
        self._device = torch.device(device)
        self._model = _build(model_path, _DTYPES[options.dtype], self._device)
        super().__init__(self._model)
        self._eos = torch.tensor(sorted(vocabulary.eos_token_ids), device=self._device)
        self._max_context = _max_context(self._model.config)

    def stream(
        self, requests: Sequence[SampleRequest], should_stop: Callable[[], bool] | None = None
    ) -> Iterator[Sample]:
        """This rank's samples, chunk after chunk; exactly one for each request of its chunks.

        All have the same parameters.

        Calls `should_stop` at every token; if it is true, raises Interrupted and drops the
        unfinished chunk. Only whole chunks are yielded, so the remaining ones have the same
        requests, and the same bits, after a resume. Raises RolloutError before the first sample: no
        complete weights, a repeated id, a prompt that is empty, too long for the model or outside
        its vocabulary. Raises RolloutError for non-finite logits.
        """
        self._check(requests)
        size = self._options.batch_sequences
        chunks = [requests[start : start + size] for start in range(0, len(requests), size)]
        for chunk in chunks[self._rank :: self._num_ranks]:
            yield from self._generate(chunk, should_stop)

    def _check(self, requests: Sequence[SampleRequest]) -> None:
        if self.version is None:
            raise RolloutError(
                "the embedded engine has no complete set of weights to sample from; finish an "
                "update (begin_update, put, end_update) first"
            )
        vocab = int(self._model.config.vocab_size)
        seen: set[str] = set()
        for request in requests:
            if request.id in seen:
                raise RolloutError(
                    f"sample id {request.id} was requested twice in one call; ids must be unique"
                )
            seen.add(request.id)
            check_request(request, vocab)
            if len(request.token_ids) + request.params.max_response_tokens > self._max_context:
                raise RolloutError(
                    f"sample {request.id}: {len(request.token_ids)} prompt tokens + "
                    f"max_tokens={request.params.max_response_tokens} exceed the model's context "
                    f"of {self._max_context}; lower max_response_tokens or max_prompt_tokens"
                )

    def _generate(
        self, chunk: Sequence[SampleRequest], should_stop: Callable[[], bool] | None
    ) -> list[Sample]:
        """All samples of one chunk, in its order."""
        # Inference tensors must not reach the trainer: only NumPy arrays leave this block.
        with torch.inference_mode():
            rows, logits = self._prefill(chunk)
            max_tokens = chunk[0].params.max_response_tokens
            tokens, logprobs, lengths, stops = self._decode(rows, logits, max_tokens, should_stop)
        if not np.isfinite(logprobs).all():
            bad = chunk[int(np.argmax(~np.isfinite(logprobs).all(axis=1)))]
            raise RolloutError(
                f"sample {bad.id}: non-finite logits from weights version {self.version}"
            )
        assert self.version is not None and self.digest is not None
        samples = []
        for row, (request, length) in enumerate(zip(chunk, lengths.tolist(), strict=True)):
            span = Span(version=self.version, digest=self.digest, start=0, end=length)
            samples.append(
                Sample(
                    id=request.id,
                    prompt_id=request.prompt_id,
                    token_ids=np.concatenate([request.token_ids, tokens[row, :length]]).astype(
                        np.int32
                    ),
                    prompt_len=len(request.token_ids),
                    sampler_logprobs=logprobs[row, :length].copy(),
                    spans=(span,) if length else (),
                    stop=stops[row],
                )
            )
        return samples

    def _prefill(self, chunk: Sequence[SampleRequest]) -> tuple[_Rows, torch.Tensor]:
        """One forward pass over the distinct prompts; repeats their keys, values and last logits
        for their samples.
        """
        [params] = {request.params for request in chunk}
        first: dict[bytes, int] = {}
        row_of = [
            first.setdefault(np.asarray(request.token_ids, dtype=np.int32).tobytes(), len(first))
            for request in chunk
        ]
        prompts = [np.frombuffer(prompt, dtype=np.int32) for prompt in first]
        longest = max(len(prompt) for prompt in prompts)
        device = self._device
        ids = np.full((len(prompts), longest), self._vocabulary.pad_token_id, dtype=np.int64)
        pads = np.array([longest - len(prompt) for prompt in prompts])
        for row, prompt in enumerate(prompts):
            ids[row, pads[row] :] = prompt  # on the left: all rows then continue in the same column
        column = np.arange(longest)
        real = column[None, :] >= pads[:, None]
        # A padding token attends to itself: a row of the mask without any column would give NaN.
        visible = (real[:, None, :] & (column[:, None] >= column[None, :])[None]) | np.eye(
            longest, dtype=bool
        )[None]
        cache = DynamicCache()
        logits = self._forward(
            torch.from_numpy(ids).to(device),
            self._additive(visible)[:, None],
            torch.from_numpy(np.maximum(column[None, :] - pads[:, None], 0)).to(device),
            cache,
        )
        rows = torch.tensor(row_of, device=device)
        cache.batch_select_indices(rows)
        future = np.ones((len(prompts), params.max_response_tokens), dtype=bool)
        state = _Rows(
            sampler=RowSampler(params, [request.seed for request in chunk], device),
            stops=_StopStrings(params.stop, len(chunk), self._vocabulary.decode),
            cache=cache,
            number=torch.arange(len(chunk), device=device),
            mask=self._additive(np.concatenate([real, future], axis=1))[rows, None, None],
            positions=torch.from_numpy(longest - pads).to(device)[rows, None],
        )
        return state, logits[rows]

    def _decode(
        self,
        rows: _Rows,
        logits: torch.Tensor,
        max_tokens: int,
        should_stop: Callable[[], bool] | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Stop]]:
        """Samples tokens until every row has ended. Raises Interrupted.

        Tokens and log-probs [rows, max_tokens], with zeros beyond each row's length, lengths and
        stops, on the host.
        """
        num_rows = len(rows.number)
        tokens = torch.zeros((max_tokens, num_rows), dtype=torch.int32, device=self._device)
        all_logprobs = torch.zeros((max_tokens, num_rows), dtype=torch.float32, device=self._device)
        lengths = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        finished = torch.zeros(num_rows, dtype=torch.bool, device=self._device)
        ended = (
            finished.clone()
        )  # of the rows that are left: decoded until the next compaction, but not recorded
        for index in range(max_tokens):
            if should_stop is not None and should_stop():
                raise Interrupted
            ids, logprobs = rows.sampler.draw(logits)
            tokens[index, rows.number] = ids.int()
            all_logprobs[index, rows.number] = logprobs
            lengths[rows.number] += ~ended
            stops = torch.isin(ids, self._eos) | rows.stops.update(ids)
            finished[rows.number] |= stops
            ended |= stops
            num_alive = len(ended) - int(ended.sum())
            if num_alive == 0 or index + 1 == max_tokens:
                break
            # Compacting copies the cache, so it runs only when at least half of the rows have
            # ended.
            if 2 * num_alive <= len(ended):
                alive = (~ended).nonzero()[:, 0]
                rows.keep(alive)
                ids = ids[alive]
                ended = ended[alive]
            columns = rows.cache.get_seq_length() + 1
            logits = self._forward(
                ids[:, None], rows.mask[..., :columns], rows.positions, rows.cache
            )
            rows.positions += 1
        inside = (torch.arange(max_tokens, device=self._device)[:, None] < lengths).T
        return (
            tokens.T.where(inside, 0).cpu().numpy(),
            all_logprobs.T.where(inside, 0.0).cpu().numpy(),
            lengths.cpu().numpy(),
            [Stop.EOS if is_finished else Stop.LENGTH for is_finished in finished.tolist()],
        )

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Logits [b, v] of the last column."""
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _additive(self, visible: np.ndarray) -> torch.Tensor:
        mask = torch.zeros(visible.shape, dtype=_DTYPES[self._options.dtype])
        return mask.masked_fill_(torch.from_numpy(~visible), -torch.inf).to(self._device)


class _StopStrings:
    """Finds stop strings in the growing text of each row, by decoding its last few tokens."""

    def __init__(
        self, stops: tuple[str, ...], num_rows: int, decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._stops = stops
        self._decode = decode
        self._tokens: list[list[int]] = [[] for _ in range(num_rows)]
        # A token is at least one byte of text, but some tokenizers strip the first one's space, or
        # hide special tokens.
        self._window = max((len(stop.encode()) for stop in stops), default=0) + 8

    def update(self, ids: torch.Tensor) -> torch.Tensor:
        """Appends one token to each row; bool [b]: whether its text contains a stop string."""
        if not self._stops:
            return torch.zeros_like(ids, dtype=torch.bool)
        found = []
        for tokens, token in zip(self._tokens, ids.tolist(), strict=True):
            tokens.append(token)
            text = self._decode(tokens[-self._window :])
            found.append(any(stop in text for stop in self._stops))
        return torch.tensor(found, device=ids.device)

    def keep(self, rows: torch.Tensor) -> None:
        self._tokens = [self._tokens[i] for i in rows.tolist()]


def _build(model_path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The module of config.json with NaN weights, so that a missing weight cannot be mistaken for a
    value.
    """
    if not (model_path / "config.json").is_file():
        raise RolloutError(
            f"{model_path}: no config.json; model.path must be a Hugging Face folder"
        )
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        with torch.random.fork_rng(devices=[]), torch.device(device):
            # Initialisation draws random numbers; the trainer's generator must not change.
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False
            )
    except Exception as error:  # keys that only transformers reads: it may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise RolloutError(
            f"{model_path}/config.json: transformers cannot build the model: {reason}; correct it"
        ) from error
    model.eval().requires_grad_(False)
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.detach().fill_(torch.nan)
    return model


def _max_context(config: Any) -> int:
    """Maximum sequence length: the context, or the window of sliding-attention layers, which this
    engine does not mask.
    """
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ()) or (
        getattr(config, "layer_types", None) is None
        and getattr(config, "sliding_window", None) is not None
    )
    limit = int(config.max_position_embeddings)
    return min(limit, int(config.sliding_window)) if sliding else limit


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `transformers`' interface: [b, heads, q, d] -> [b, q, heads, d], mask additive
    [b, 1, q, kv].

    With one query token the heads that share a key head become the rows of one product, so keys and
    values are not copied once for each of them.
    """
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    scaling: float = kwargs["scaling"]
    if queries == 1:
        grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
        out = scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scaling
        )
        return out.reshape(batch, 1, heads, dim), None
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=heads != kv_heads
    )
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, grouped_attention)
