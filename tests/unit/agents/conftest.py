import queue
from contextlib import contextmanager

import numpy as np
import pytest

from pacs_megatron.agents.pool import AgentPool, Callbacks
from pacs_megatron.config.agent_options import AgentOptions
from pacs_megatron.contracts import Prompt, Sample, SampleRequest, SamplingOptions, Span, Stop
from pacs_megatron.contracts.turns import TurnMarkers
from pacs_megatron.data.turns import TurnEncoder
from tests.support.tiny_models import save_tokenizer

MARKERS = TurnMarkers(
    answer_end="<|im_end|>\n",
    before={"tool": "<|im_start|>tool\n"},
    after={"tool": "<|im_end|>\n"},
    generation="<|im_start|>assistant\n",
)
IMPORTS = "import asyncio, os, signal, sys, time\n"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def encoder(tokenizer):
    return TurnEncoder(MARKERS, tokenizer)


@pytest.fixture
def agent_file(tmp_path):
    """Writes the body of `solve`; returns the function's name."""

    def write(body, start=""):
        lines = [f"    {line}" for line in body.strip("\n").splitlines()]
        text = f"{IMPORTS}{start}\nasync def solve(problem, session):\n" + "\n".join(lines) + "\n"
        file = tmp_path / "my_agent.py"
        file.write_text(text)
        return f"{file}:solve"

    return write


def turn(tokenizer, request, text, *, ends=True, version=3):
    """A turn of the policy, cut at the limit of its request."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if ends:
        ids = [*ids, tokenizer.eos_token_id]
    limit = request.params.max_response_tokens
    kept = ids[:limit]
    return Sample(
        id=request.id,
        prompt_id=request.prompt_id,
        token_ids=np.array([*request.token_ids, *kept], dtype=np.int32),
        prompt_len=len(request.token_ids),
        sampler_logprobs=np.linspace(-1, -2, len(kept), dtype=np.float32),
        spans=(Span(version=version, digest=f"d{version}", start=0, end=len(kept)),),
        stop=Stop.LENGTH if len(kept) < len(ids) or not ends else Stop.EOS,
    )


class Run:
    """A pool whose policy answers from a script: turn k of a trajectory is `script[k]`."""

    def __init__(self, options, encoder, tokenizer, script):
        self.requests = []
        self.finished: queue.SimpleQueue = queue.SimpleQueue()
        self._turns: dict[str, int] = {}

        def request_turn(request):
            self.requests.append(request)
            number = self._turns.get(request.id, 0)
            self._turns[request.id] = number + 1
            if number < len(script):
                self.pool.deliver([turn(tokenizer, request, script[number])])

        def decode(ids):
            return tokenizer.decode(ids.tolist(), skip_special_tokens=True)

        callbacks = Callbacks(
            request_turn=request_turn,
            done=self.finished.put,
            changed=lambda: None,
            failed=self.finished.put,
        )
        self.pool = AgentPool(options, encoder, [tokenizer.eos_token_id], decode, callbacks)

    def start(self, count=1, *, max_tokens=400):
        """Starts `count` trajectories."""
        prompts = {}
        requests = []
        for number in range(count):
            prompt = Prompt(
                id=f"p/{number}",
                text="the prompt",
                token_ids=np.array([104, 105], dtype=np.int32),
                answer="secret",
                problem=f"problem {number}",
            )
            prompts[prompt.id] = prompt
            request = SampleRequest(
                id=f"1:{prompt.id}#0",
                prompt_id=prompt.id,
                token_ids=prompt.token_ids,
                seed=number,
                params=SamplingOptions(max_response_tokens=max_tokens),
            )
            requests.append(request)
        self.pool.start(requests, prompts)

    def solve(self, count=1, *, max_tokens=400):
        """The samples of `count` trajectories, by number."""
        self.start(count, max_tokens=max_tokens)
        samples = []
        for _ in range(count):
            sample = self.finished.get(timeout=120)
            if isinstance(sample, Exception):
                raise sample
            samples.append(sample)
        return sorted(samples, key=lambda sample: sample.id)


@pytest.fixture
def running(encoder, tokenizer):
    @contextmanager
    def run(function, script=("ok",) * 50, **changes):
        options = AgentOptions.model_validate(
            {"function": function, "workers": 2, "tool_workers": 2, **changes}
        )
        started = Run(options, encoder, tokenizer, script)
        with started.pool:
            yield started

    return run
