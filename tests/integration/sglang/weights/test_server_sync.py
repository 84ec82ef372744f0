"""Weights into the real server, every way: what it samples from afterwards, and what becomes of a
sync that fails.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.contracts import Sample
from pacs_megatron.errors import SyncError
from pacs_megatron.sglang.api import ServerRejectedError, SglangApi
from pacs_megatron.sglang.fleet import Health
from pacs_megatron.sglang.weights.bucket import Bucket
from pacs_megatron.training.push import push
from tests.integration.sglang.conftest import Lab, sample_requests

pytestmark = [pytest.mark.sglang]
BF16_NATS = 0.15
SMALL_BUCKET = {"bucket_mib": 1}


def worst(lab: Lab, weights: int, sample: Sample, start: int = 0, end: int | None = None) -> float:
    """Largest log-prob difference between the sample's and those of `weights`, response tokens
    [start, end).
    """
    expected = lab.logprobs(weights, sample.token_ids)[sample.prompt_len - 1 :]
    ids = torch.from_numpy(sample.response_ids.astype(np.int64))[:, None]
    got = expected.gather(1, ids)[:, 0].numpy()
    return float(np.abs(sample.sampler_logprobs - got)[start:end].max())


@pytest.mark.parametrize("transport", ["disk", "broadcast", "ipc"])
def test_every_way_brings_all_weights(lab: Lab, transport: str) -> None:
    """After each update, log-probs are the new weights' and the server's checksums equal the
    export's.
    """
    with lab.opened(weights=None, sync={"transport": transport}):
        digests = set()
        for step in range(4):
            weights = step % 2
            digests.add(lab.push(weights))
            report = lab.sync.report
            assert report.failed == {}
            assert report.verified == 19  # of 25 exported tensors: q, k, v and gate, up are fused
            [sample, other] = lab.engine.stream(
                sample_requests(2, tag=f"{transport}{step}", temperature=0.0)
            )
            assert worst(lab, weights, sample) < BF16_NATS
            assert worst(lab, 1 - weights, sample) > 0.5
            assert [(s.version, s.digest) for s in other.spans] == [(lab.version, report.digest)]
        assert len(digests) == 2


def test_sample_verification_looks_at_changing_parameters(lab: Lab) -> None:
    with lab.opened(weights=None, sync={"verify": "sample"}):
        looked_at = set()
        for step in range(3):
            lab.push(step % 2)
            assert lab.sync.report.verified == (19 if step == 0 else 8)
            looked_at.add(lab.sync._sample)
        assert len(looked_at) == 3


class Corrupting:
    """A transport that damages what passes: one byte of one bucket, or a whole tensor that it
    swallows.
    """

    def __init__(self, inner: Any, what: str) -> None:
        self._inner = inner
        self._what = what

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prepare(self, bucket: Bucket) -> None:
        if self._what == "byte":
            bucket.data[-3] ^= 1
        elif self._what == "tensor":
            bucket.num_bytes -= bucket.tensors.pop()[1].nbytes
        self._inner.prepare(bucket)


@pytest.mark.parametrize("what", ["byte", "tensor"])
def test_damage_on_the_way_is_found_and_never_sampled(lab: Lab, what: str) -> None:
    with lab.opened(weights=0):
        transport = lab.sync._transport
        lab.sync._transport = Corrupting(transport, what)
        with pytest.raises(
            SyncError,
            match=r"1 of 19 parameters differ from the export by the server's checksums: \S+ ",
        ):
            lab.push(1)
        api = SglangApi(url=lab.url)
        assert api.weight_version() == f"{lab.version}:updating"
        lab.engine.set_current(lab.version, "never-arrived")
        assert lab.engine.status()[0].health is Health.STALE
        lab.sync._transport = transport
        lab.push(1)
        assert lab.engine.status()[0].health is Health.HEALTHY
        [sample] = lab.engine.stream(sample_requests(1, tag=f"d{what}"))
        assert worst(lab, 1, sample) < BF16_NATS


@pytest.mark.parametrize("transport", ["broadcast", "ipc"])
def test_a_sync_that_dies_half_way_leaves_nothing_to_sample_from(lab: Lab, transport: str) -> None:
    """The trainer stops after half of the weights; the server is unusable until the next push."""
    with lab.opened(weights=0, sync={"transport": transport}):
        lab.engine.begin_update()
        lab.sync.begin_update(lab.version + 1)
        named = list(lab.export(1))
        for name, tensor in named[: len(named) // 2]:
            lab.sync.put(name, tensor)
        lab.sync._flush()
        # ... and here it dies: no end_update. A client that knew only the old version finds the
        # server unusable.
        lab.engine.set_current(lab.version, lab.sync.report.digest)
        assert lab.engine.status()[0].health is Health.STALE
        assert "updating" in lab.engine.status()[0].reason
        lab.version += 1
        lab.push(1)
        [sample] = lab.engine.stream(sample_requests(1, tag=f"h{transport}"))
        assert worst(lab, 1, sample) < BF16_NATS


def test_a_broken_group_is_rebuilt(lab: Lab) -> None:
    """The connection breaks between two buckets: this update fails within its time limit, the next
    one works.
    """
    with lab.opened(weights=0, sync={"timeout_s": 5.0}):
        api = SglangApi(url=lab.url)
        group = lab.sync._transport._groups[api.url].name  # type: ignore[attr-defined]
        api.call("/destroy_weights_update_group", {"group_name": group})
        began = time.monotonic()
        with pytest.raises(SyncError, match="reached no rollout server"):
            lab.push(1)
        assert time.monotonic() - began < 300  # a limit of 5 s, not of the run
        lab.push(1)
        [sample] = lab.engine.stream(sample_requests(1, tag="broken"))
        assert worst(lab, 1, sample) < BF16_NATS


def test_a_restarted_server_joins_again(lab: Lab) -> None:
    """It reports `default` and has no group: the first push must reach it."""
    with lab.opened(weights=0):
        api = SglangApi(url=lab.url)
        group = lab.sync._transport._groups[api.url].name  # type: ignore[attr-defined]
        api.call("/destroy_weights_update_group", {"group_name": group})
        api.set_weight_version("default")
        lab.push(1)
        [sample] = lab.engine.stream(sample_requests(1, tag="restarted"))
        assert worst(lab, 1, sample) < BF16_NATS


def test_a_folder_that_cannot_be_written_is_named(lab: Lab) -> None:
    message = r"sync\.transport=disk: cannot write /proc/no/such/\S+-[0-9a-f]{8}/v"
    with (
        lab.opened(weights=None, sync={"transport": "disk", "folder": "/proc/no/such"}),
        pytest.raises(SyncError, match=message),
    ):
        lab.push(0)


def test_an_unreachable_server_fails_that_server_and_the_export_is_still_drained(lab: Lab) -> None:
    """All ranks take part in the export, so a push that cannot succeed must still iterate it to its
    end.
    """
    with lab.opened(weights=0):
        taken = []

        def export() -> Any:
            for name, tensor in lab.export(1):
                taken.append(name)
                yield name, tensor

        lab.sync.set_targets([SglangApi(url="http://127.0.0.1:9", timeout_s=1.0)])
        with pytest.raises(
            SyncError,
            match=r"reached no rollout server: http://127.0.0.1:9.*no response .*Cannot connect",
        ):
            push(lab.version + 1, export(), [lab.sync])
        assert len(taken) == 25


def test_one_of_two_servers_fails_and_the_other_goes_on(lab: Lab) -> None:
    with lab.opened(weights=0):
        lab.sync.set_targets(
            [SglangApi(url=lab.url), SglangApi(url="http://127.0.0.1:9", timeout_s=1.0)]
        )
        lab.push(1)
        assert lab.sync.report.updated == (lab.url,)
        assert list(lab.sync.report.failed) == ["http://127.0.0.1:9"]
        [sample] = lab.engine.stream(sample_requests(1, tag="one"))
        assert worst(lab, 1, sample) < BF16_NATS


@pytest.mark.parametrize("pause", ["retract", "in_place", "abort"])
def test_an_update_in_the_middle_of_generation(lab: Lab, pause: str) -> None:
    """Partial rollouts:

    `retract` and `in_place` keep their tokens with the version of each; `abort` restarts the whole
    response.
    """
    for delay_s in (0.5, 0.25, 1.0, 0.1, 2.0):
        first, done = _updated_while_generating(lab, pause, delay_s)
        # How fast the server is differs from host to host: the update may come before the first
        # token or after the last.
        if any(
            s.spans[-1].version == first + 1 and (pause == "abort" or len(s.spans) == 2)
            for s in done
        ):
            break
    mixed = [s for s in done if len(s.spans) == 2]
    if pause == "abort":
        assert mixed == []
        assert any(s.spans[0].version == first + 1 for s in done)
    else:
        assert mixed
    for sample in done:
        assert sample.spans[0].start == 0
        assert sample.spans[-1].end == sample.response_len
    for sample in mixed:
        old, new = sample.spans
        assert (old.version, new.version) == (first, first + 1)
        assert worst(lab, 0, sample, old.start, old.end) < BF16_NATS
        if (
            pause == "retract"
        ):  # the KV cache is the new weights' too, so are the log-probs, exactly
            assert worst(lab, 1, sample, new.start, new.end) < BF16_NATS


def _updated_while_generating(lab: Lab, pause: str, delay_s: float) -> tuple[int, list[Sample]]:
    """(version before the update, samples), the update sent `delay_s` after the requests."""
    with lab.opened(weights=0, max_in_flight=8, sync={"pause": pause, "verify": "off"}):
        first = lab.version
        done: list[Sample] = []
        asked = sample_requests(8, tag=f"m{pause}{delay_s}", tokens=400)
        reader = threading.Thread(target=lambda: done.extend(lab.engine.stream(asked)))
        reader.start()
        time.sleep(delay_s)
        lab.push(1)
        reader.join(600)
    assert sorted(s.id for s in done) == sorted(r.id for r in asked)
    return first, done


def test_memory_is_given_back_and_taken_with_the_next_weights(lab: Lab) -> None:
    """On CPU there is nothing to give back, but the order of calls is the GPU's."""
    with lab.opened(weights=0):
        lab.sync.release_memory()
        assert SglangApi(url=lab.url).weight_version() == f"{lab.version}:updating"
        lab.push(1)
        [sample] = lab.engine.stream(sample_requests(1, tag="mem"))
        assert worst(lab, 1, sample) < BF16_NATS
        lab.push(0)


def test_servers_without_sessions_are_known_by_their_404(lab: Lab) -> None:
    api = SglangApi(url=lab.url)
    assert api.begin_weight_update() is True
    assert api.begin_weight_update() is True  # an open one is closed and opened again
    api.end_weight_update()
    with pytest.raises(ServerRejectedError, match="HTTP 400"):
        api.end_weight_update()
    with pytest.raises(ServerRejectedError) as refused:
        api.call("/begin_weight_update_of_old_servers", {})
    assert refused.value.status == 404
