"""Trajectories a second of agents with SGLang, beside single-turn requests of as many tokens.

    python benchmarks/agent_client.py [--trajectories 4096] [--in-flight 2048] [--workers N]

The server is a stand-in in a process of its own: it responds after a fixed time and computes
nothing. So the figures are those of the driver: seconds, CPU seconds and memory of its process, and
CPU seconds and memory of the agents' workers. Prints one JSON object. Each form runs in a process
of its own.

    turns    4 turns of 16 tokens with a message of about 8 tokens between them
    single   one response of 64 tokens, without agent
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pacs_megatron.config.agent_options import AgentOptions
from pacs_megatron.config.rollout_options import SglangRollout
from pacs_megatron.contracts import Prompt, SampleRequest, SamplingOptions
from pacs_megatron.contracts.turns import TurnMarkers
from pacs_megatron.data.turns import TurnEncoder
from pacs_megatron.rollout.server_agents import ServerAgents
from pacs_megatron.sglang.api import SglangApi
from pacs_megatron.sglang.client import SglangEngine
from pacs_megatron.sglang.fleet import Server

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PROMPT_TOKENS = 64
TURN_TOKENS = 16
END_TOKEN = 258
AGENT = """
async def solve(problem, session):
    for _ in range({turns} - 1):
        await session.generate(max_tokens={tokens})
        session.append("the text of a tool")
    await session.generate(max_tokens={tokens})
"""
MARKERS = TurnMarkers(answer_end="", before={"tool": "<"}, after={"tool": ">"}, generation="=")


def serve(connection: Any, token_s: float) -> None:
    """A stand-in server, until the connection closes."""
    from tests.support.servers.replay_sglang import ReplaySglang

    # Each response has the maximum length.
    with ReplaySglang(token_s=token_s, median_tokens=1e6, spread=0.0) as server:
        server.weight_version = "1:aa"
        connection.send((server.url, server.api_key))
        connection.poll(None)


def options(in_flight: int) -> SglangRollout:
    return SglangRollout.model_construct(
        max_in_flight=in_flight,
        probe_interval_s=1.0,
        probe_timeout_s=600.0,
        dead_after_s=600.0,
        max_failures=1000,
        request_timeout_s=600.0,
        retries=3,
        all_down_after_s=600.0,
    )


def requests(count: int, tokens: int) -> list[SampleRequest]:
    params = SamplingOptions(temperature=1.0, top_p=1.0, top_k=0, max_response_tokens=tokens)
    ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
    return [
        SampleRequest(
            id=f"1:p{number // 8}#{number % 8}",
            prompt_id=f"p{number // 8}",
            token_ids=ids,
            seed=number,
            params=params,
        )
        for number in range(count)
    ]


def prompt_of(request: SampleRequest) -> Prompt:
    return Prompt(id=request.prompt_id, text="", token_ids=request.token_ids, answer="", problem="")


def measure(form: str, address: tuple[str, str | None], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one form, in this process."""
    from tests.support.tiny_models import save_tokenizer

    url, api_key = address
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        members = [Server(SglangApi(url=url, api_key=api_key))]
        engine = stack.enter_context(SglangEngine(members, options(args.in_flight), vocab_size=272))
        engine.set_current(1, "aa")
        sampler: Any = engine
        num_tokens = args.turns * TURN_TOKENS
        if form == "turns":
            sampler = stack.enter_context(agents(engine, folder, save_tokenizer(folder), args))
            num_tokens += args.turns * 32
        # The first trajectories start the workers.
        began = time.perf_counter()
        list(sampler.stream(requests(args.in_flight, num_tokens)))
        start_s = time.perf_counter() - began

        process = psutil.Process()
        cpu_began = cpu_s(process)
        workers_began = cpu_of_children(process)
        began = time.perf_counter()
        samples = list(sampler.stream(requests(args.trajectories, num_tokens)))
        seconds = time.perf_counter() - began
        policy_tokens = sum(sample.response_len for sample in samples)
        assert policy_tokens == args.trajectories * args.turns * TURN_TOKENS, policy_tokens
        assert all(sample.failure is None for sample in samples)
        children = process.children(recursive=True)
        return {
            "form": form,
            "trajectories_per_s": round(args.trajectories / seconds, 1),
            "seconds": round(seconds, 2),
            "first_round_s": round(start_s, 2),
            "driver_cpu_ms": round((cpu_s(process) - cpu_began) / args.trajectories * 1000, 3),
            "workers_cpu_ms": round(
                (cpu_of_children(process) - workers_began) / args.trajectories * 1000, 3
            ),
            "driver_mib": round(process.memory_info().rss / 2**20),
            "workers": len(children),
            "worker_mib": round(mean_mib(children), 1),
        }


def agents(
    engine: SglangEngine, folder: Path, tokenizer: Any, args: argparse.Namespace
) -> ServerAgents:
    file = folder / "agent.py"
    file.write_text(AGENT.format(turns=args.turns, tokens=TURN_TOKENS))
    workers = args.workers or args.in_flight
    configured = AgentOptions(function=f"{file}:solve", workers=workers, timeout_s=3600)

    def decode(ids: np.ndarray) -> str:
        return str(tokenizer.decode(ids.tolist()))

    encoder = TurnEncoder(MARKERS, tokenizer)
    return ServerAgents(engine, configured, encoder, [END_TOKEN], decode, prompt_of)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def cpu_of_children(process: psutil.Process) -> float:
    return sum(cpu_s(child) for child in process.children(recursive=True))


def mean_mib(processes: list[psutil.Process]) -> float:
    """Mean memory of each, pages that it shares with others divided among them."""
    if not processes:
        return 0.0
    total = 0
    for process in processes:
        total += int(process.memory_full_info().pss)
    return total / len(processes) / 2**20


def run_form(
    connection: Any, form: str, address: tuple[str, str], args: argparse.Namespace
) -> None:
    connection.send(measure(form, address, args))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=4096)
    parser.add_argument("--in-flight", type=int, default=2048)
    parser.add_argument("--workers", type=int, help="open trajectories; default: all in flight")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--token-s", type=float, default=0.01, help="the stand-in's time a token")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=serve, args=(theirs, args.token_s), daemon=True)
    server.start()
    theirs.close()
    address = ours.recv()

    results = []
    for form in ("single", "turns"):
        parent, child = spawn.Pipe()
        process = spawn.Process(target=run_form, args=(child, form, address, args))
        process.start()
        child.close()
        results.append(parent.recv())
        process.join()
        print(results[-1], file=sys.stderr, flush=True)
    ours.close()
    server.terminate()
    print(json.dumps({"arguments": vars(args), "results": results}))


if __name__ == "__main__":
    main()
