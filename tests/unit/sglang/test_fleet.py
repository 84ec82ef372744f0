"""Servers of a fleet: which ones get requests, and which ones are waited for."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from pacs_megatron.contracts import Sample
from pacs_megatron.sglang import fleet
from pacs_megatron.sglang.fleet import Health
from tests.support.servers.client import engine, http, requests, until
from tests.support.servers.fake_sglang import FakeSglang

HTML = b"<html><body><h1>502 Bad Gateway</h1>\n<hr>nginx</body></html>"


@pytest.mark.parametrize(
    "body", [b"[]", b"null", b'{"weight_version"', HTML, b"", b'{"model_path": "x"}']
)
def test_a_probe_that_is_answered_with_nonsense_makes_no_server_usable(
    fake: FakeSglang, body: bytes
) -> None:
    """... and does not end the watch: the server comes back when it answers."""
    fake.raw["/model_info"] = http(body)
    with engine([fake]) as client:
        [status] = client.status()
        assert status.health is Health.SUSPECT and "is it SGLang?" in status.reason
        fake.raw.clear()
        assert until(lambda: client.status()[0].health is Health.HEALTHY)


def test_a_bug_in_the_fleet_ends_the_streams_at_once(
    fake: FakeSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine([fake], probe_timeout_s=0.3) as client:
        fake.fault = "hang"
        threading.Timer(0.3, setattr, (client._fleet, "_query_version", None)).start()
        with pytest.raises(TypeError, match="not callable"):
            list(client.stream(requests(2)))


def test_requests_on_a_server_that_missed_an_update_start_over_elsewhere(
    fake: FakeSglang, other: FakeSglang
) -> None:
    """An update that failed half-way leaves it paused for good: what it works on would be waited
    for an hour.
    """
    with engine([fake, other], max_in_flight=4) as client:
        fake.paused = other.paused = True  # `retract` or `in_place`: requests wait
        got: list[Sample] = []
        asked = requests(8)
        reader = threading.Thread(target=lambda: got.extend(client.stream(asked)))
        reader.start()
        assert until(lambda: fake.most_in_flight == 4 and other.most_in_flight == 4)
        client.begin_update()
        fake.weight_version = "2:updating"
        other.weight_version = "2:bb"
        other.paused = False
        client.set_current(2, "bb")
        reader.join(600)
        assert not reader.is_alive() and len(got) == 8
        assert all({span.digest for span in sample.spans} == {"bb"} for sample in got)
        assert client.status()[0].health is Health.STALE and client.status()[0].in_flight == 0
        assert until(lambda: len(fake.aborted) == 4)  # it listens still


def test_requests_on_a_server_with_complete_older_weights_may_finish(
    fake: FakeSglang, other: FakeSglang
) -> None:
    """It did not take part in the update and is not paused."""
    fake.latency_s = other.latency_s = lambda _: 1.0
    with engine([fake, other], max_in_flight=4) as client:
        got: list[Sample] = []
        asked = requests(8)
        reader = threading.Thread(target=lambda: got.extend(client.stream(asked)))
        reader.start()
        assert until(lambda: fake.most_in_flight == 4 and other.most_in_flight == 4)
        client.begin_update()
        other.weight_version = "2:bb"
        client.set_current(2, "bb")
        reader.join(600)
        assert len(got) == 8 and sum(fake.asked.values()) == 4


def test_a_silent_server_is_dead_although_updates_come_more_often_than_that(
    fake: FakeSglang, other: FakeSglang
) -> None:
    """Each update waits for a server that is not DEAD; its silence counts over updates."""
    with engine([fake, other], dead_after_s=1.5, probe_timeout_s=0.2) as client:
        fake.fault = "hang"
        began = time.monotonic()
        while client.status()[0].health is not Health.DEAD and time.monotonic() - began < 600:
            time.sleep(0.4)
            client.begin_update()
            client.set_current(1, "aa")
        assert client.status()[0].health is Health.DEAD
        assert until(lambda: client.status()[1].health is Health.HEALTHY)


def test_silence_during_an_update_marks_no_server_dead(
    fake: FakeSglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No probe runs then, and a server that loads weights does not respond."""
    passed_s = [0.0]
    monkeypatch.setattr(
        fleet, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0])
    )
    with engine([fake], dead_after_s=600.0, probe_timeout_s=0.3) as client:
        client.begin_update()
        fake.fault = "hang"
        passed_s[0] = 3600.0
        assert client.status()[0].health is Health.STALE
        client.set_current(1, "aa")
        assert client.status()[0].health is Health.SUSPECT
        fake.fault = "none"
        assert until(lambda: client.status()[0].health is Health.HEALTHY)


def test_a_dead_server_of_others_that_comes_back_is_found_during_an_update(
    fake: FakeSglang,
) -> None:
    """Its owner restarts it while the trainer steps: the update that then begins must not end the
    run.
    """
    with engine([fake], dead_after_s=0.5, probe_timeout_s=0.3) as client:
        fake.refuse()
        assert until(lambda: client.status()[0].health is Health.DEAD)
        client.begin_update()
        [status] = client.status()
        assert status.health is Health.DEAD and status.returning
        fake.weight_version = "default"
        fake.accept()
        assert until(lambda: client.status()[0].health is Health.STALE)
        assert client.status()[0].reason == "responds again"
        fake.weight_version = "2:bb"
        client.set_current(2, "bb")
        assert until(lambda: client.status()[0].health is Health.HEALTHY)
