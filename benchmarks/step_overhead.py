"""Share of a training step that is neither model forward and backward nor generation.

    python benchmarks/step_overhead.py [--steps 12] [--updates 1]

The quickstart's model (random weights), prompts and batch, one rank, the real loop with driver,
reward workers, weight export, metrics and files. Timed inside it: Megatron's forward-backward
schedule without its gradient reduction, and the embedded engine's sampling. Everything else is
overhead: batching, control channel, rewards, objective, optimizer, export of weights, logging.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

WARMUP_STEPS = 2
# A random model has no correct answers, and groups of one class have no gradient: labels are a
# function of the text.
REWARD = """def reward(prompt, response):
    return float(sum(response.encode()) % 2)
"""


@dataclass
class Stopwatch:
    """Seconds by name since the last `take`."""

    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, which adds its seconds to `name` and its CPU seconds to `<name>_cpu`."""

        @functools.wraps(work)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            start_cpu = time.process_time()
            try:
                return work(*args, **kwargs)
            finally:
                self._add(f"{name}_cpu", time.process_time() - start_cpu)
                self._add(name, time.perf_counter() - start)

        return call

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        seconds = self.seconds
        self.seconds = {}
        return seconds


@contextmanager
def instrumented(watch: Stopwatch, rows: list[dict[str, float]]) -> Any:
    """Inside the block, every step of the loop appends its seconds to `rows`."""
    from pacs_megatron.embedded.engine import EmbeddedEngine
    from pacs_megatron.policy import engine, schedule
    from pacs_megatron.training import loop

    run_schedule = schedule.run_schedule
    finalize_model_grads = engine.finalize_model_grads
    generate = EmbeddedEngine._generate
    train_step = loop.train_step

    def step(*args: Any) -> Any:
        watch.take()
        start = time.perf_counter()
        start_cpu = time.process_time()
        result = train_step(*args)
        seconds = watch.take()
        model = seconds["schedule"] - seconds.get("reduction", 0.0)
        rows.append(
            {
                "step": time.perf_counter() - start,
                "cpu": time.process_time() - start_cpu,
                "model": model,
                "generation": seconds["generation"],
                "generation_cpu": seconds["generation_cpu"],
            }
        )
        return result

    schedule.run_schedule = watch.timed("schedule", run_schedule)
    engine.finalize_model_grads = watch.timed("reduction", finalize_model_grads)
    EmbeddedEngine._generate = watch.timed("generation", generate)  # type: ignore[method-assign]
    loop.train_step = step
    try:
        yield
    finally:
        schedule.run_schedule = run_schedule
        engine.finalize_model_grads = finalize_model_grads
        EmbeddedEngine._generate = generate  # type: ignore[method-assign]
        loop.train_step = train_step


def make_inputs(folder: Path) -> None:
    """The quickstart's model and problems, and the reward."""
    from examples.quickstart.model import build_model
    from examples.quickstart.problems import write_problems

    build_model(folder / "model", 0)
    write_problems(folder / "data", 0)
    (folder / "reward.py").write_text(REWARD)


def run_loop(folder: Path, steps: int, *overrides: str) -> list[dict[str, float]]:
    """Seconds of each step after the warm-up:

    `step`, `model`, `generation`; `cpu`: this process's CPU time of the step.
    """
    from pacs_megatron.training.main import run_rank

    settings = [
        f"run.dir={folder}/runs",
        f"run.steps={steps + WARMUP_STEPS}",
        "parallel.tp=1",
        f"model.path={folder}/model",
        f"data.train.path={folder}/data/train.json",
        "reward.name=custom",
        f"reward.function={folder}/reward.py:reward",
        "optimizer.lr=1e-6",
        "optimizer.min_lr=0.0",
        "optimizer.warmup_updates=0",
        "evaluation.benchmarks=[]",
        "evaluation.every=null",
        "evaluation.samples_per_prompt=4",
        "evaluation.k=[1]",
        "evaluation.sampling=null",
        "checkpoint.every=null",
        *overrides,
    ]
    rows: list[dict[str, float]] = []
    with instrumented(Stopwatch(), rows):
        run_rank(ROOT / "configs" / "runs" / "quickstart.yaml", settings)
    return rows[WARMUP_STEPS:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--updates", type=int, default=1, help="optimizer updates a step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        rows = run_loop(folder, options.steps, f"batch.updates_per_step={options.updates}")

    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    shares = [1 - (row["model"] + row["generation"]) / row["step"] for row in rows]
    print(f"median of {len(rows)} steps, {options.updates} updates a step:")
    for key in ("step", "generation", "model"):
        print(f"  {key:<12} {medians[key]:8.3f} s  {medians[key] / medians['step']:6.1%}")
    print(
        f"  overhead     {statistics.median(shares):>18.1%}  (from {min(shares):.1%} to "
        f"{max(shares):.1%})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
