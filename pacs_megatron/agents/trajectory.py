"""The exact tokens of one trajectory: the prompt, then pieces of the policy and of the environment.

The list of token ids only grows. A token that the policy sampled is never encoded again.
"""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from pacs_megatron.contracts import Sample, SampleRequest, Span, Stop, ToolCall
from pacs_megatron.contracts.samples import AGENT_FAILURE
from pacs_megatron.data.turns import Message, TurnEncoder
from pacs_megatron.errors import AgentError


class Trajectory:
    """A trajectory that is not finished. One thread uses it."""

    def __init__(self, request: SampleRequest, encoder: TurnEncoder, stops: frozenset[int]) -> None:
        """Starts with the prompt.

        Args:
            request: of the whole response; its limit counts the environment's tokens too.
            encoder: of messages.
            stops: tokens that end a turn.
        """
        self.request = request
        self.calls: list[ToolCall] = []
        self.turns = 0
        """finished turns of the policy"""
        self.own_reward: float | None = None
        """the number that `solve` returned"""
        self._encoder = encoder
        self._stops = stops
        self._pieces: list[np.ndarray] = []
        """int32, of the response"""
        self._logprobs: list[np.ndarray] = []
        self._length = 0
        self._environment: list[tuple[int, int]] = []
        self._spans: list[Span] = []
        self._is_truncated = False
        self._cached_tokens: list[int] = []
        self._read_tokens: list[int] = []

    @property
    def left(self) -> int:
        """Number of tokens that the response can still have."""
        return self.request.params.max_response_tokens - self._length

    @property
    def num_turns(self) -> int:
        """`Sample.num_turns` so far."""
        return len(self._environment) + (self.turns > 0)

    @property
    def is_truncated(self) -> bool:
        """Whether the limit of the response ended it."""
        return self._is_truncated

    def truncate(self) -> None:
        """Ends the trajectory as one that is too long."""
        self._is_truncated = True

    def next_request(
        self, messages: Sequence[Message], max_tokens: int | None, stop: Sequence[str]
    ) -> SampleRequest | None:
        """The request for the policy's next turn, after `messages`.

        Args:
            messages: since the last turn.
            max_tokens: of the turn; None: what is left.
            stop: strings that end the turn.

        Returns:
            None: the limit of the response leaves no token for it. The messages are not added.

        Raises:
            AgentError: the conversation cannot be continued so.
        """
        params = self.request.params
        # More strings in the configuration are those of the embedded engine, which has no limit.
        if len(params.stop) <= _MAX_STOPS < len(stop) + len(params.stop):
            raise AgentError(f"{len(stop)} stop strings, at most {_MAX_STOPS - len(params.stop)}")
        block = self._block(messages)
        left = self.left - len(block)
        if left <= 0:
            self.truncate()
            return None
        if len(block):
            self._environment.append((self._length, self._length + len(block)))
            self._add(block, np.zeros(len(block), dtype=np.float32))

        limit = left if max_tokens is None else min(max_tokens, left)
        turn_params = params.model_copy(
            update={"max_response_tokens": limit, "stop": (*params.stop, *stop)}
        )
        return SampleRequest(
            id=self.request.id,
            prompt_id=self.request.prompt_id,
            token_ids=np.concatenate([self.request.token_ids, *self._pieces]).astype(np.int32),
            seed=turn_seed(self.request.seed, self.turns),
            params=turn_params,
        )

    def add(self, turn: Sample) -> None:
        """Adds the policy's turn to the last request."""
        for span in turn.spans:
            moved = replace(span, start=span.start + self._length, end=span.end + self._length)
            self._spans.append(moved)
        self._add(turn.response_ids, turn.sampler_logprobs)
        self._cached_tokens += turn.cached_tokens
        self._read_tokens.append(turn.prompt_len)
        self.turns += 1
        if turn.stop is Stop.LENGTH and self.left == 0:
            self.truncate()

    def finished(self, failure: str | None = None) -> Sample:
        """The sample. It ends with the last token of the policy.

        Args:
            failure: why there is no verdict; None: the reward judges it.
        """
        environment = self._environment
        pieces = self._pieces
        logprobs = self._logprobs
        if environment and environment[-1][1] == self._length:
            # The turn after it was never sampled.
            environment = environment[:-1]
            pieces = pieces[:-1]
            logprobs = logprobs[:-1]
        request = self.request
        if failure is None and not self.turns:
            failure = f"{AGENT_FAILURE}it ended without a turn of the policy"
        return Sample(
            id=request.id,
            prompt_id=request.prompt_id,
            token_ids=np.concatenate([request.token_ids, *pieces]).astype(np.int32),
            prompt_len=len(request.token_ids),
            sampler_logprobs=np.concatenate([np.empty(0, np.float32), *logprobs]),
            spans=tuple(self._spans),
            stop=Stop.LENGTH if self._is_truncated else Stop.EOS,
            failure=failure,
            environment=tuple(environment),
            calls=tuple(self.calls),
            own_reward=self.own_reward,
            cached_tokens=tuple(self._cached_tokens),
            read_tokens=tuple(self._read_tokens),
        )

    def _block(self, messages: Sequence[Message]) -> np.ndarray:
        """int32, the tokens between the last turn and the next one. Raises AgentError."""
        if not self.turns:
            if messages:
                raise AgentError("a message before the first turn; put its text into the prompt")
            return np.empty(0, dtype=np.int32)
        last_id = int(self._pieces[-1][-1])
        if not messages:
            if last_id in self._stops:
                raise AgentError("the policy has ended its turn; append a message before the next")
            return np.empty(0, dtype=np.int32)
        # A token needs at least one character, except in normalizers that drop some.
        num_chars = sum(len(message.text) for message in messages)
        if num_chars > _CHARS_PER_TOKEN * max(self.left, 1) + _CHARS_PER_TOKEN:
            return np.zeros(self.left, dtype=np.int32)  # does not fit; it is not encoded
        try:
            return self._encoder.encode(messages, last_id)
        except ValueError as error:
            raise AgentError(f"append: {error}") from error

    def _add(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        self._pieces.append(np.asarray(ids, dtype=np.int32))
        self._logprobs.append(np.asarray(logprobs, dtype=np.float32))
        self._length += len(ids)


_MAX_STOPS = 32
"""Stop strings of a request, a limit of SGLang"""
_CHARS_PER_TOKEN = 256
"""No text of a tool has longer tokens on average; above it a message is not even encoded, because
100 MB of text would take minutes.
"""


def turn_seed(seed: int, turn: int) -> int:
    """63-bit seed of a turn; that of the first one is the trajectory's."""
    if turn == 0:
        return seed
    key = f"{seed}|{turn}".encode()
    digest = blake2b(key, digest_size=8, person=b"pacs-turn").digest()
    return int.from_bytes(digest, "big") >> 1
