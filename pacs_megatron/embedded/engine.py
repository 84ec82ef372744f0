"""The embedded rollout engine, for a laptop and for tests.

It samples inside the ranks with Hugging Face `transformers`.

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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from pacs_megatron.config.rollout_options import EmbeddedRollout
from pacs_megatron.contracts import Interrupted, Sample, SampleRequest, Span, Stop
from pacs_megatron.contracts.samples import check_request
from pacs_megatron.data import stop_token_ids
from pacs_megatron.embedded.sampling import RowSampler
from pacs_megatron.embedded.weight_inbox import WeightInbox
from pacs_megatron.errors import RolloutError
from pacs_megatron.models import load_spec

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
        """The vocabulary of a `transformers` tokenizer.

        Its end tokens are those of every engine (`data.end_tokens`).

        Raises:
            DataError: there is no end token.
        """
        eos = stop_token_ids(tokenizer, model_path)
        pad = tokenizer.pad_token_id
        if pad is None:
            pad = eos[0]

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=False))

        return cls(eos_token_ids=frozenset(eos), pad_token_id=int(pad), decode=decode)


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
        """Drops all other rows.

        Args:
            alive: int64 [rows to keep], increasing.
        """
        self.sampler.keep(alive)
        self.stops.keep(alive)
        _select_rows(self.cache, alive)
        self.number = self.number[alive]
        self.mask = self.mask[alive]
        self.positions = self.positions[alive]


class _Decoded(NamedTuple):
    """The responses of a chunk, on the host; zeros beyond a row's length."""

    tokens: np.ndarray
    """int32 [rows, max_tokens]"""
    logprobs: np.ndarray
    """float32 [rows, max_tokens], nats"""
    lengths: np.ndarray
    """int64 [rows]"""
    stops: list[Stop]


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
        """Builds the module, without weights.

        Args:
            model_path: Hugging Face folder with a config.json.
            options: chunk size and dtype.
            vocabulary: of the tokenizer.
            rank: this process samples the chunks rank, rank + num_ranks, ...
            num_ranks: number of processes that sample together.
            device: of the module.

        Raises:
            RolloutError: the config.json is not usable.
        """
        self._options = options
        self._vocabulary = vocabulary
        self._rank = rank
        self._num_ranks = num_ranks
        self._device = torch.device(device)
        self._model = _build(model_path, _DTYPES[options.dtype], self._device)
        super().__init__(self._model)
        self._eos = torch.tensor(sorted(vocabulary.eos_token_ids), device=self._device)
        spec = load_spec(model_path)
        self._max_context = spec.max_context
        self._is_hybrid = spec.delta is not None

    def stream(
        self, requests: Sequence[SampleRequest], should_stop: Callable[[], bool] | None = None
    ) -> Iterator[Sample]:
        """This rank's samples, chunk after chunk; exactly one for each request of its chunks.

        Only whole chunks are yielded, so the remaining ones have the same requests, and the same
        bits, after a resume.

        Args:
            requests: those of all ranks, in the same order on every rank, with the same temperature
                and filters.
            should_stop: called at every token.

        Raises:
            Interrupted: `should_stop` returned true; the unfinished chunk is dropped.
            RolloutError: before the first sample, if there are no complete weights, an id is
                repeated, or a prompt is empty, too long for the model or outside its vocabulary.
                Later, if logits are not finite.
        """
        self._check(requests)
        size = self._options.batch_sequences
        first = self._rank * size
        stride = self._num_ranks * size
        for start in range(first, len(requests), stride):
            chunk = requests[start : start + size]
            yield from self._generate(chunk, should_stop)

    def _check(self, requests: Sequence[SampleRequest]) -> None:
        """Raises RolloutError if the engine cannot sample from all requests."""
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
            prompt_len = len(request.token_ids)
            max_tokens = request.params.max_response_tokens
            if prompt_len + max_tokens > self._max_context:
                raise RolloutError(
                    f"sample {request.id}: {prompt_len} prompt tokens + "
                    f"max_tokens={max_tokens} exceed the model's context "
                    f"of {self._max_context}; lower max_response_tokens or max_prompt_tokens"
                )

    def _generate(
        self, chunk: Sequence[SampleRequest], should_stop: Callable[[], bool] | None
    ) -> list[Sample]:
        """All samples of one chunk, in its order."""
        # Inference tensors must not reach the trainer: only NumPy arrays leave this block.
        with torch.inference_mode():
            rows, logits = self._prefill(chunk)
            limits = [request.params.max_response_tokens for request in chunk]
            decoded = self._decode(rows, logits, limits, should_stop)
        has_finite_logprobs = np.isfinite(decoded.logprobs).all(axis=1)
        if not has_finite_logprobs.all():
            bad = chunk[int(np.argmax(~has_finite_logprobs))]
            raise RolloutError(
                f"sample {bad.id}: non-finite logits from weights version {self.version}"
            )
        return [self._sample(request, decoded, row) for row, request in enumerate(chunk)]

    def _sample(self, request: SampleRequest, decoded: _Decoded, row: int) -> Sample:
        assert self.version is not None and self.digest is not None
        length = int(decoded.lengths[row])
        span = Span(version=self.version, digest=self.digest, start=0, end=length)
        token_ids = np.concatenate([request.token_ids, decoded.tokens[row, :length]])
        return Sample(
            id=request.id,
            prompt_id=request.prompt_id,
            token_ids=token_ids.astype(np.int32),
            prompt_len=len(request.token_ids),
            sampler_logprobs=decoded.logprobs[row, :length].copy(),
            spans=(span,) if length else (),
            stop=decoded.stops[row],
        )

    def _prefill(self, chunk: Sequence[SampleRequest]) -> tuple[_Rows, torch.Tensor]:
        """The rows of a chunk and the logits [b, v] of their first tokens.

        One forward pass over the distinct prompts; their keys, values and last logits are repeated
        for their samples.
        """
        params = chunk[0].params
        max_tokens = max(request.params.max_response_tokens for request in chunk)
        prompts, prompt_of = _distinct_prompts(chunk)
        longest = max(len(prompt) for prompt in prompts)
        pads = np.array([longest - len(prompt) for prompt in prompts])
        ids = np.full((len(prompts), longest), self._vocabulary.pad_token_id, dtype=np.int64)
        for row, prompt in enumerate(prompts):
            # Padding on the left: all rows then continue in the same column.
            ids[row, pads[row] :] = prompt

        column = np.arange(longest)
        is_real = column[None, :] >= pads[:, None]
        is_causal = column[:, None] >= column[None, :]
        # A padding token attends to itself: a row of the mask without any column would give NaN.
        is_diagonal = np.eye(longest, dtype=bool)
        visible = (is_real[:, None, :] & is_causal[None]) | is_diagonal[None]
        positions = np.maximum(column[None, :] - pads[:, None], 0)
        device = self._device
        # By its config a hybrid gets states of gated delta nets beside keys and values.
        cache = DynamicCache(config=self._model.config if self._is_hybrid else None)
        logits = self._forward(
            torch.from_numpy(ids).to(device),
            self._additive(visible)[:, None],
            torch.from_numpy(positions).to(device),
            cache,
            torch.from_numpy(is_real).to(device),
        )

        row_of = torch.tensor(prompt_of, device=device)
        _select_rows(cache, row_of)
        is_response = np.ones((len(prompts), max_tokens), dtype=bool)
        is_visible = np.concatenate([is_real, is_response], axis=1)
        rows = _Rows(
            sampler=RowSampler(params, [request.seed for request in chunk], device),
            stops=_StopStrings([request.params.stop for request in chunk], self._vocabulary.decode),
            cache=cache,
            number=torch.arange(len(chunk), device=device),
            mask=self._additive(is_visible)[row_of, None, None],
            positions=torch.from_numpy(longest - pads).to(device)[row_of, None],
        )
        return rows, logits[row_of]

    def _decode(
        self,
        rows: _Rows,
        logits: torch.Tensor,
        limits: Sequence[int],
        should_stop: Callable[[], bool] | None,
    ) -> _Decoded:
        """Samples tokens until every row has ended.

        Args:
            rows: all rows of the chunk after the prefill.
            logits: [b, v], of the first tokens.
            limits: of the length of each response.
            should_stop: called at every token.

        Raises:
            Interrupted: `should_stop` returned true.
        """
        num_rows = len(rows.number)
        max_tokens = max(limits)
        row_limits = torch.tensor(limits, device=self._device)
        tokens = torch.zeros((max_tokens, num_rows), dtype=torch.int32, device=self._device)
        all_logprobs = torch.zeros((max_tokens, num_rows), dtype=torch.float32, device=self._device)
        lengths = torch.zeros(num_rows, dtype=torch.int64, device=self._device)
        finished = torch.zeros(num_rows, dtype=torch.bool, device=self._device)
        # Of the rows that are left. They are decoded until the next compaction, but not recorded.
        ended = finished.clone()
        for index in range(max_tokens):
            if should_stop is not None and should_stop():
                raise Interrupted
            ids, logprobs = rows.sampler.draw(logits)
            tokens[index, rows.number] = ids.int()
            all_logprobs[index, rows.number] = logprobs
            lengths[rows.number] += ~ended
            stops = torch.isin(ids, self._eos) | rows.stops.update(ids)
            finished[rows.number] |= stops
            ended |= stops | (lengths[rows.number] >= row_limits[rows.number])

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
            mask = rows.mask[..., :columns]
            logits = self._forward(ids[:, None], mask, rows.positions, rows.cache)
            rows.positions += 1

        steps = torch.arange(max_tokens, device=self._device)
        is_inside = (steps[:, None] < lengths).T
        return _Decoded(
            tokens=tokens.T.where(is_inside, 0).cpu().numpy(),
            logprobs=all_logprobs.T.where(is_inside, 0.0).cpu().numpy(),
            lengths=lengths.cpu().numpy(),
            stops=[Stop.EOS if is_eos else Stop.LENGTH for is_eos in finished.tolist()],
        )

    def _forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache,
        is_real: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of the last column.

        Args:
            ids: int64 [b, columns].
            mask: [b, 1, columns, all columns of the cache], additive.
            positions: int64 [b, columns].
            cache: keys and values of the earlier columns; those of `ids` are added.
            is_real: bool [b, columns], false where `ids` is padding; None: no padding.

        Returns:
            [b, v], in the model's dtype.
        """
        # A gated delta net has no mask of columns: padding must not enter its state.
        masks = {"full_attention": mask, "linear_attention": is_real}
        output = self._model(
            input_ids=ids,
            attention_mask=masks if self._is_hybrid else mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _additive(self, visible: np.ndarray) -> torch.Tensor:
        """The mask that is added to attention scores: 0 where `visible`, else -inf."""
        mask = torch.zeros(visible.shape, dtype=_DTYPES[self._options.dtype])
        return mask.masked_fill_(torch.from_numpy(~visible), -torch.inf).to(self._device)


def _select_rows(cache: DynamicCache, rows: torch.Tensor) -> None:
    """Keeps these rows of the cache, int64 [rows], in their order; one may occur several times."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.reorder_cache(rows)
        else:
            layer.batch_select_indices(rows)


def _distinct_prompts(chunk: Sequence[SampleRequest]) -> tuple[list[np.ndarray], list[int]]:
    """(distinct prompts in the order of the chunk, number of each request's prompt)."""
    numbers: dict[bytes, int] = {}
    prompt_of = []
    for request in chunk:
        content = np.asarray(request.token_ids, dtype=np.int32).tobytes()
        prompt_of.append(numbers.setdefault(content, len(numbers)))
    prompts = [np.frombuffer(content, dtype=np.int32) for content in numbers]
    return prompts, prompt_of


class _StopStrings:
    """Finds stop strings in the growing text of each row, by decoding its last few tokens."""

    def __init__(
        self, stops: Sequence[tuple[str, ...]], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """Starts with empty rows.

        Args:
            stops: the strings of each row; if all are empty, `update` costs nothing.
            decode: token ids to text, with special tokens.
        """
        self._stops = list(stops)
        self._is_used = any(stops)
        self._decode = decode
        self._tokens: list[list[int]] = [[] for _ in stops]
        # A token is at least one byte of text, but some tokenizers strip the first one's space, or
        # hide special tokens.
        lengths = [max((len(stop.encode()) for stop in row), default=0) for row in stops]
        self._window = max(lengths, default=0) + 8

    def update(self, ids: torch.Tensor) -> torch.Tensor:
        """Appends one token to each row.

        Returns:
            bool [b], whether the row's text contains a stop string.
        """
        if not self._is_used:
            return torch.zeros_like(ids, dtype=torch.bool)
        has_stop = []
        for tokens, token, stops in zip(self._tokens, ids.tolist(), self._stops, strict=True):
            tokens.append(token)
            text = self._decode(tokens[-self._window :]) if stops else ""
            has_stop.append(any(stop in text for stop in stops))
        return torch.tensor(has_stop, device=ids.device)

    def keep(self, rows: torch.Tensor) -> None:
        self._tokens = [self._tokens[row] for row in rows.tolist()]
        self._stops = [self._stops[row] for row in rows.tolist()]


def _build(model_path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The module of config.json with NaN weights.

    A missing weight can then not be mistaken for a value.
    """
    if not (model_path / "config.json").is_file():
        raise RolloutError(
            f"{model_path}: no config.json; model.path must be a Hugging Face folder"
        )
    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        # Initialisation draws random numbers; the trainer's generator must not change.
        with torch.random.fork_rng(devices=[]), torch.device(device):
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


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with the interface of `transformers`.

    With one query token the heads that share a key head become the rows of one product, so keys and
    values are not copied once for each of them.

    Args:
        module: the layer; not used.
        query: [b, heads, q, d].
        key: [b, kv_heads, kv, d].
        value: [b, kv_heads, kv, d].
        attention_mask: [b, 1, q, kv], additive.
        kwargs: `scaling`, the factor of the scores; others are not used.

    Returns:
        [b, q, heads, d], and None for the weights of the attention.
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
