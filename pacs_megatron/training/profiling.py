"""Profiles and times of the steps (`observability`). Off, it adds no collective, no wait for a GPU
and no span.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from pacs_megatron.config.schema import ObservabilityOptions, ProfileOptions, RunConfig
from pacs_megatron.models.flops import total_flops
from pacs_megatron.observability.profile import StepProfiler, device_span
from pacs_megatron.observability.rank_times import append_rank_times, span_seconds
from pacs_megatron.parallel.transfer import gather_json
from pacs_megatron.runtime.gpus import GPUS
from pacs_megatron.runtime.run_folder import PROFILE_FOLDER
from pacs_megatron.sglang.api import SglangApi
from pacs_megatron.sglang.build import server_apis
from pacs_megatron.sglang.profile import ServerProfiler
from pacs_megatron.training.context import RunContext

logger = logging.getLogger(__name__)


def has_step_times(options: ObservabilityOptions) -> bool:
    """Whether the run logs and records the times of its steps."""
    if options.step_times is None:
        return options.profile is not None
    return options.step_times


class Profiling:
    """The profiles of this rank and of the servers, and the times of the steps."""

    def __init__(self, run: RunContext) -> None:
        """Adds spans inside the phases if the run has step times."""
        self._run = run
        config: RunConfig = run.config
        options: ObservabilityOptions = config.observability
        profile: ProfileOptions | None = options.profile
        rank = run.rank
        self._ranks = StepProfiler(profile, run.run_dir, rank.rank, rank.device)
        self._ranks.watch(run.timer)

        self._servers = None
        if profile is not None and profile.servers and run.driver is not None:
            folder = run.run_dir / PROFILE_FOLDER
            self._servers = ServerProfiler(profile, folder, self._find_servers)
        if profile is not None and rank.rank == 0:
            _warn_of_missing_ranks(profile, rank.layout.world_size)

        if has_step_times(options):
            span = device_span(run.timer, rank.device)
            run.rollouts.span = span
            for model in run.models:
                model.span = span

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profiles this rank during the body if `step` is listed."""
        with self._ranks.step(step):
            yield

    @contextmanager
    def servers(self, step: int) -> Iterator[None]:
        """Profiles the servers during the body, which samples `step`, if it is listed."""
        with nullcontext() if self._servers is None else self._servers.step(step):
            yield

    def _find_servers(self) -> Sequence[SglangApi]:
        options = self._run.config.rollout.sglang
        assert self._run.driver is not None and options is not None
        header, _ = self._run.driver.call({"op": "servers"})
        return server_apis(options, tuple(header["urls"]))


def _warn_of_missing_ranks(profile: ProfileOptions, world_size: int) -> None:
    """torchrun may start fewer ranks than the configuration expects."""
    missing = [number for number in profile.ranks if number >= world_size]
    if missing:
        logger.warning(
            "observability.profile.ranks contains %d, but the run has %d ranks",
            missing[0],
            world_size,
        )


def step_metrics(run: RunContext, step: int, times: Mapping[str, float]) -> dict[str, float]:
    """Records the times of a step and logs its line on rank 0. Collective.

    Args:
        run: the run, with step times.
        step: its number.
        times: of `Timer.take`, with `tokens_per_s` if the step has responses.

    Returns:
        `speed/*` (docs/metrics.md).
    """
    seconds = span_seconds({key: times[key] for key in times if key.startswith("time/")})
    ranks = gather_json(seconds, group=run.rank.control)
    metrics = _speed(run, times)
    if ranks is not None:
        append_rank_times(run.run_dir, step, ranks)
        unit = "GPU" if run.rank.device.type == "cuda" else "rank"
        logger.info("%s", step_line(step, seconds, metrics, unit))
    return metrics


def _speed(run: RunContext, times: Mapping[str, float]) -> dict[str, float]:
    flops = 0.0
    for model in run.models:
        forward, trained = model.take_tokens()
        flops += total_flops(
            model.spec, model.table.padded_vocab, forward, trained, model.num_adapted
        )

    num_ranks = run.rank.layout.world_size
    training_s = times.get("time/logprobs_s", 0.0) + times.get("time/update_s", 0.0)
    metrics: dict[str, float] = {}
    if "tokens_per_s" in times:
        metrics["speed/tokens_per_s_per_gpu"] = times["tokens_per_s"] / num_ranks
    if not flops or not training_s:
        return metrics

    tflops = flops / num_ranks / 1e12
    metrics["speed/tflops_per_gpu"] = tflops / training_s
    gpu = GPUS.get(run.config.resources.gpu or "")
    if gpu is not None:
        metrics["speed/mfu"] = tflops / training_s / gpu.bf16_tflops
        metrics["speed/step_mfu"] = tflops / times["time/step_s"] / gpu.bf16_tflops
    return metrics


def step_line(
    step: int, seconds: Mapping[str, float], metrics: Mapping[str, float], unit: str
) -> str:
    """`step 5: 12.3 s (rollout 61 %, update 30 %, other 9 %), 1,234 tokens/s a GPU, ...`

    Args:
        step: its number.
        seconds: of `span_seconds`.
        metrics: `speed/*`.
        unit: `GPU` or `rank`.
    """
    whole = seconds["step"]
    phases = {path: value for path, value in seconds.items() if "/" not in path}
    del phases["step"]
    phases["other"] = max(whole - sum(phases.values()), 0.0)
    longest_first = sorted(phases.items(), key=lambda phase: -phase[1])
    shares = [f"{name} {100 * value / whole:.0f} %" for name, value in longest_first]

    parts = [f"step {step}: {whole:.1f} s ({', '.join(shares)})"]
    if "speed/tokens_per_s_per_gpu" in metrics:
        parts.append(f"{metrics['speed/tokens_per_s_per_gpu']:,.0f} tokens/s a {unit}")
    if "speed/tflops_per_gpu" in metrics:
        parts.append(f"{metrics['speed/tflops_per_gpu']:.3g} TFLOP/s a {unit} in training")
    if "speed/mfu" in metrics:
        of_step = 100 * metrics["speed/step_mfu"]
        parts.append(f"MFU {100 * metrics['speed/mfu']:.1f} % ({of_step:.1f} % of the step)")
    return ", ".join(parts)
