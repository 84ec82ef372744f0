"""A token that the policy sampled is never encoded again."""

import numpy as np
import pytest

from pacs_megatron.agents.trajectory import Trajectory, turn_seed
from pacs_megatron.contracts import Sample, SampleRequest, SamplingOptions, Span, Stop
from pacs_megatron.data.turns import Message, TurnEncoder
from tests.support.tiny_tokenizers import KINDS, save_kind
from tests.unit.agents.conftest import MARKERS

TEXTS = ("12", " this", "\nthing\n", "", "語🙂", "<|im_end|>", "a<|im_start|>assistant\n", "\x00")


@pytest.fixture(scope="module", params=KINDS)
def of_kind(request, tmp_path_factory):
    tokenizer = save_kind(tmp_path_factory.mktemp(request.param), request.param)
    return tokenizer, TurnEncoder(MARKERS, tokenizer)


def sampled(request, ids, *, version, stop=Stop.EOS):
    return Sample(
        id=request.id,
        prompt_id=request.prompt_id,
        token_ids=np.array([*request.token_ids, *ids], dtype=np.int32),
        prompt_len=len(request.token_ids),
        sampler_logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
        spans=(Span(version=version, digest="d", start=0, end=len(ids)),),
        stop=stop,
    )


def started(encoder, stops, max_tokens=10_000):
    request = SampleRequest(
        id="1:p#0",
        prompt_id="p",
        token_ids=np.array([5, 6, 7], dtype=np.int32),
        seed=9,
        params=SamplingOptions(max_response_tokens=max_tokens),
    )
    return Trajectory(request, encoder, frozenset(stops))


def test_sampled_tokens_stay_as_they_are(of_kind):
    """Random ids: incomplete bytes, and pieces that no encoder chooses."""
    tokenizer, encoder = of_kind
    end = tokenizer.eos_token_id
    generator = np.random.default_rng(3)
    for _ in range(40):
        trajectory = started(encoder, [end])
        expected = [5, 6, 7]
        policy = []
        logprobs = []
        versions = []
        messages = []
        for turn in range(int(generator.integers(1, 5))):
            request = trajectory.next_request(messages, None, ())
            if messages:
                block = encoder.encode(messages, expected[-1])
                expected += block.tolist()
                policy += [False] * len(block)
                logprobs += [0.0] * len(block)
            assert request.token_ids.tolist() == expected, "the request has the exact ids"

            ids = generator.integers(0, len(tokenizer), int(generator.integers(1, 12))).tolist()
            if generator.random() < 0.7:
                ids.append(end)
            trajectory.add(sampled(request, ids, version=turn))
            versions.append((turn, len(policy), len(policy) + len(ids)))
            expected += ids
            policy += [True] * len(ids)
            logprobs += (-np.arange(1.0, len(ids) + 1)).tolist()
            chosen = generator.choice(TEXTS, int(generator.integers(1, 3)))
            messages = [Message("tool", str(text)) for text in chosen]

        sample = trajectory.finished()
        assert sample.token_ids.tolist() == expected and sample.prompt_len == 3
        mask = np.ones(len(sample.response_ids), dtype=bool)
        for start, stop in sample.environment:
            mask[start:stop] = False
        assert mask.tolist() == policy
        assert sample.sampler_logprobs.tolist() == logprobs
        spans = [(span.version, span.start, span.end) for span in sample.spans]
        assert spans == versions


def test_a_turn_that_was_cut_continues_without_a_message(of_kind):
    _, encoder = of_kind
    trajectory = started(encoder, [258])
    request = trajectory.next_request([], 2, ["x"])
    assert (request.params.max_response_tokens, request.params.stop) == (2, ("x",))
    trajectory.add(sampled(request, [1, 2], version=0, stop=Stop.LENGTH))
    request = trajectory.next_request([], None, ())
    assert request.token_ids.tolist() == [5, 6, 7, 1, 2]
    trajectory.add(sampled(request, [3], version=0))
    sample = trajectory.finished()
    assert (sample.response_ids.tolist(), sample.environment) == ([1, 2, 3], ())
    assert sample.stop is Stop.EOS, "a turn's own limit does not truncate the response"


@pytest.mark.parametrize(("max_tokens", "is_truncated"), [(4, True), (5, False)])
def test_the_last_token_of_the_response(of_kind, max_tokens, is_truncated):
    _, encoder = of_kind
    trajectory = started(encoder, [258], max_tokens)
    request = trajectory.next_request([], 4, ())
    trajectory.add(sampled(request, [1, 2, 3, 4], version=0, stop=Stop.LENGTH))
    assert trajectory.finished().stop is (Stop.LENGTH if is_truncated else Stop.EOS)


def test_seeds_of_turns():
    seeds = [turn_seed(7, turn) for turn in range(100)]
    assert seeds[0] == 7 and len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert turn_seed(7, 1) != turn_seed(8, 1)
