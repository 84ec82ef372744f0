"""Trajectories of an agent on the real server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from pacs_megatron.config.agent_options import AgentOptions
from pacs_megatron.contracts import Prompt, SampleRequest
from pacs_megatron.contracts.turns import TurnMarkers
from pacs_megatron.data.turns import TurnEncoder
from pacs_megatron.rollout.agent_metrics import agent_metrics
from pacs_megatron.rollout.server_agents import ServerAgents
from tests.integration.sglang.conftest import Lab, sample_requests

pytestmark = [pytest.mark.sglang, pytest.mark.full]
BF16_NATS = 0.15
"""As in test_client_generation.py"""
MARKERS = TurnMarkers(answer_end="", before={"tool": "<"}, after={"tool": ">"}, generation="=")
AGENT = """
async def solve(problem, session):
    for turn in range(3):
        await session.generate(max_tokens=12, stop=["X"])
        session.append(await session.call("calculate", expression=f"{turn} + 40"))
    await session.generate(max_tokens=8)
"""


def prompt_of(request: SampleRequest) -> Prompt:
    return Prompt(id=request.prompt_id, text="", token_ids=request.token_ids, answer="", problem="")


def test_turns_have_the_log_probs_of_their_exact_tokens(lab: Lab, tmp_path: Path) -> None:
    """Against one forward of `transformers` over each whole trajectory."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    options = AgentOptions.model_validate(
        {
            "function": f"{tmp_path / 'my_agent.py'}:solve",
            "tools": {"calculate": {"kind": "calculator"}},
            "tool_workers": 1,
            "workers": 8,
        }
    )
    tokenizer = AutoTokenizer.from_pretrained(lab.folders[0])
    encoder = TurnEncoder(MARKERS, tokenizer)

    def decode(ids: np.ndarray) -> str:
        return str(tokenizer.decode(ids.tolist()))

    wanted = sample_requests(12, tag="agents", tokens=100)
    with lab.opened(weights=1):
        stops = [int(tokenizer.eos_token_id)]
        with ServerAgents(lab.engine, options, encoder, stops, decode, prompt_of) as agents:
            samples = list(agents.stream(wanted))

    assert sorted(sample.id for sample in samples) == sorted(request.id for request in wanted)
    for sample in samples:
        assert sample.failure is None and sample.num_turns == 4
        expected = lab.logprobs(1, sample.token_ids)[sample.prompt_len - 1 :].numpy()
        got = expected[np.arange(len(sample.response_ids)), sample.response_ids]
        is_policy = np.ones(len(got), dtype=bool)
        for turn, (start, end) in enumerate(sample.environment):
            is_policy[start:end] = False
            assert decode(sample.response_ids[start:end]) == f"<{turn + 40}>="
        np.testing.assert_allclose(
            sample.sampler_logprobs[is_policy], got[is_policy], atol=BF16_NATS
        )
        assert {(span.version, span.digest) for span in sample.spans} == {
            (lab.version, lab.sync.report.digest)
        }
    assert agent_metrics(samples, ["calculate"])["agent/cached_frac"] > 0.5
