"""A server that responds to every request with the sample that another run recorded, for replays of
whole runs.

The weight versions are those of the recording: the response for a sample with tokens of several
versions is sent when the newest of them has arrived here, and no step ends (which would bring new
weights) before every request that started with the old weights has arrived. Weights come by
`sync.transport: disk`; it does not check them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from pacs_megatron.contracts import Sample, Stop
from pacs_megatron.observability.rollout_log import RECORD_SUFFIX, ROLLOUT_FOLDER
from pacs_megatron.sglang.api import WeightVersion
from tests.support.rollout import read_record
from tests.support.servers.fake_sglang import FakeSglang

POLL_S = 0.002


class RecordedSglang(FakeSglang):
    """`run_dir` is the recorded run's, `options` are FakeSglang's.

    While `holds(sample)` is true, the response is delayed.
    """

    def __init__(self, run_dir: Path, **options: Any) -> None:
        self.samples: dict[str, Sample] = {}
        for path in sorted((run_dir / ROLLOUT_FOLDER).glob(f"*{RECORD_SUFFIX}")):
            self.samples |= {sample.id: sample for sample in read_record(path)}
        self.steps: dict[int, set[str]] = {}
        """step -> ids of its samples, without evaluations"""
        for sample_id in self.samples:
            if not sample_id.startswith("eval"):
                self.steps.setdefault(int(sample_id.partition(":")[0]), set()).add(sample_id)
        self._begun_by = {step: self._with_weights_before(step) for step in self.steps}
        self.holds: Callable[[Sample], bool] = lambda _: False
        self.finished: set[str] = set()
        """ids of samples whose response was sent"""
        super().__init__(**options)

    def _routes(self, app: web.Application) -> None:
        super()._routes(app)
        app.router.add_post("/update_weights_from_disk", self._empty)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], rid: str
    ) -> web.StreamResponse:
        sample_id = rid.rpartition("/")[0]
        sample = self.samples.get(sample_id)
        if sample is None:
            return web.json_response(
                {"error": {"message": f"{sample_id} was not recorded"}}, status=400
            )
        prompt = sample.token_ids[: sample.prompt_len].tolist()
        if body["input_ids"] != prompt:
            return web.json_response(
                {"error": {"message": f"{sample_id} has another prompt"}}, status=400
            )
        while self.paused or self.holds(sample) or not self._is_due(sample):
            await asyncio.sleep(POLL_S)
        ids = sample.response_ids.tolist()
        is_cut = sample.stop is Stop.LENGTH
        meta = {
            "id": rid,
            "finish_reason": {"type": "length", "length": len(ids)}
            if is_cut
            else {"type": "stop", "matched": 0},
            "weight_versions": [
                {"version": f"{span.version}:{span.digest}", "start": span.start, "end": span.end}
                for span in sample.spans
            ],
            # A float32 written as a float64 is read as the same float32.
            "output_token_logprobs": [
                [value, token, None]
                for value, token in zip(sample.sampler_logprobs.tolist(), ids, strict=True)
            ],
        }
        meta |= self._meta(sample, body)
        self.answered += 1
        self.finished.add(sample_id)
        return web.json_response({"text": "", "output_ids": ids, "meta_info": meta})

    def _meta(self, sample: Sample, body: dict[str, Any]) -> dict[str, Any]:
        """Changes of the response."""
        return {}

    def _with_weights_before(self, step: int) -> set[str]:
        """Samples that the recorded run started with weights from before the update of `step` (one
        update a step).
        """
        ids: set[str] = set().union(*self.steps.values())
        return {sample_id for sample_id in ids if self.samples[sample_id].spans[0].version < step}

    def _is_due(self, sample: Sample) -> bool:
        """True if the weights of its last token have arrived and its step may end."""
        held = WeightVersion.parse(self.weight_version)
        if held is None or held.version < sample.spans[-1].version:
            return False
        if sample.id.startswith("eval"):
            return True
        begun = self._begun_by[int(sample.id.partition(":")[0])]
        return all(other in self.asked or other in self.finished for other in begun)


class SynchronousSglang(RecordedSglang):
    """For runs without steps ahead, with any number of updates a step; it may be restarted during
    the run.
    """

    def _is_due(self, sample: Sample) -> bool:
        held = WeightVersion.parse(self.weight_version)
        return held is not None and held.version >= sample.spans[-1].version
