"""`policy.routing: replay_sampler` through `train`: recorded samples with injected experts, by a
server that returns them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacs_megatron.contracts import Sample
from pacs_megatron.errors import ExitCode
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.rollout.sample_arrays import write_record
from tests.support.ahead import STOPPED_IN_STEP_3
from tests.support.rollout import read_record
from tests.support.routing_runs import LAYERS, TOP_K, start
from tests.support.servers.recorded_sglang import SynchronousSglang
from tests.support.tiers import in_tiers
from tests.support.tiny_families import make_family
from tests.support.tiny_models import make_tiny_qwen3

pytestmark = pytest.mark.full
EXPERTS = 4
LAYOUTS = {
    "one": ("parallel.tp=1",),
    "tp2ep2": ("parallel.tp=2", "parallel.ep=2", "parallel.sequence_parallel=true"),
    "pp2": ("parallel.tp=1", "parallel.pp=2"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_qwen3(tmp_path_factory.mktemp("model"), vocab_size=262)  # its tokenizer
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    return make_family(folder, "qwen3_moe", vocab_size=262, num_hidden_layers=LAYERS)


class RoutedSglang(SynchronousSglang):
    """Returns the experts of `run_dir`'s records, and the weights that it has now: the replay
    changes the recorded ones.
    """

    has_routes = True

    def _meta(self, sample: Sample, body: dict[str, Any]) -> dict[str, Any]:
        meta = {
            "weight_versions": [
                {"version": self.weight_version, "start": 0, "end": sample.response_len}
            ]
        }
        if self.has_routes and body.get("return_routed_experts"):
            assert sample.routes is not None
            meta["routed_experts"] = encoded(sample.routes)
        return meta


def encoded(routes: np.ndarray) -> str:
    import base64

    return base64.b64encode(routes.astype("<i4").tobytes()).decode()


def sglang(server: RoutedSglang, routing: str = "replay_sampler") -> tuple[str, ...]:
    rollout = (
        f"{{engine: sglang, urls: ['{server.url}'], dtype: bf16, retries: 1, sync: {{transport: "
        "disk, verify: 'off'}, sampling: {max_response_tokens: 12, stop: ['a', 'b']}}"
    )
    return (f"rollout={rollout}", f"policy.routing={routing}")


def weights(folder: Path) -> bytes:
    return (folder / "runs" / "tiny" / "hf" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[str, int], Path]:
    """A folder of records whose samples have random experts; `seed` gives those of the last token
    in step 2.
    """
    folder = tmp_path_factory.mktemp("recorded")
    done = start(folder, model, "parallel.tp=1")
    assert done.returncode == ExitCode.OK, done.stderr

    def with_experts(name: str, seed: int) -> Path:
        target = folder / name
        (target / "rollouts").mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        other = np.random.default_rng(seed)
        for path in sorted((folder / "runs" / "tiny" / "rollouts").glob("*.safetensors")):
            samples = []
            for sample in read_record(path):
                shape = (len(sample.token_ids) - 1, LAYERS, 1)
                routes = rng.permuted(np.tile(np.arange(EXPERTS), shape), axis=-1)[
                    ..., :TOP_K
                ].astype(np.int16)
                if seed and sample.id.startswith("2:"):  # one token of each sample of step 2
                    routes[-1] = (routes[-1] + other.choice([1, 3])) % EXPERTS
                samples.append(replace(sample, routes=routes))
            write_record(target / "rollouts" / path.name, samples)
        return target

    return with_experts


@pytest.mark.parametrize("layout", in_tiers(LAYOUTS, "tp2ep2"))
def test_training_replays_the_recorded_experts(
    tmp_path: Path, model: Path, recorded: Any, layout: str
) -> None:
    records = recorded("random", 0)
    with RoutedSglang(records) as server:
        run = (*sglang(server), *LAYOUTS[layout])
        done = start(tmp_path / "whole", model, *run)
        assert done.returncode == ExitCode.OK, done.stderr
        requested = {
            body["rid"]: body.get("return_routed_experts", False) for body in server.bodies
        }
        assert requested and all(requested.values())
        for path in (records / "rollouts").glob(
            "*.safetensors"
        ):  # the run's own records have the experts too
            mine = {
                sample.id: sample.routes
                for sample in read_record(tmp_path / "whole/runs/tiny/rollouts" / path.name)
            }
            for sample in read_record(path):
                np.testing.assert_array_equal(mine[sample.id], sample.routes)
        own = start(tmp_path / "own", model, *sglang(server, "own"), *LAYOUTS[layout])
        assert own.returncode == ExitCode.OK, own.stderr
        assert weights(tmp_path / "own") != weights(tmp_path / "whole")
    first, other = (read_metrics(tmp_path / name / "runs" / "tiny")[0] for name in ("whole", "own"))
    # The sampler chose its own experts: the log-probs of other ones are far away.
    assert first["mismatch/logprob_abs_mean"] > 10 * other["mismatch/logprob_abs_mean"]


def test_a_stop_inside_a_step_continues_with_the_same_experts(
    tmp_path: Path, model: Path, recorded: Any
) -> None:
    with RoutedSglang(recorded("random", 0)) as server:
        run = (*sglang(server), *LAYOUTS["one"])
        assert start(tmp_path / "whole", model, *run).returncode == ExitCode.OK
        stopped = start(tmp_path / "cut", model, *run, program=("-c", STOPPED_IN_STEP_3))
        assert stopped.returncode == ExitCode.PREEMPTED, stopped.stderr
        assert (tmp_path / "cut/runs/tiny/checkpoints/step_000002_plus_01").is_dir()
        changed = start(tmp_path / "cut", model, *sglang(server, "own"), *LAYOUTS["one"])
        assert changed.returncode == ExitCode.FAILED and "policy.routing is " in changed.stderr
        assert "of its updates, with 'replay_sampler': " in changed.stderr
        assert start(tmp_path / "cut", model, *run).returncode == ExitCode.OK
        assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    with RoutedSglang(recorded("one-wrong", 1)) as server:
        assert (
            start(tmp_path / "wrong", model, *sglang(server), *LAYOUTS["one"]).returncode
            == ExitCode.OK
        )
    rows, wrong = (read_metrics(tmp_path / name / "runs" / "tiny") for name in ("whole", "wrong"))
    name = "mismatch/logprob_abs_mean"
    assert rows[0][name] == wrong[0][name] and rows[1][name] != wrong[1][name]
    assert weights(tmp_path / "wrong") != weights(tmp_path / "whole")


def test_a_server_without_experts_ends_the_run_in_one_line(
    tmp_path: Path, model: Path, recorded: Any
) -> None:
    with RoutedSglang(recorded("random", 0)) as server:
        server.has_routes = False
        done = start(tmp_path / "run", model, *sglang(server), *LAYOUTS["one"])
    assert done.returncode == ExitCode.FAILED and "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("RolloutError")]
    assert "start the server with --enable-return-routed-experts" in line
