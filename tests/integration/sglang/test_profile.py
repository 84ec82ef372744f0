"""Profiles of the real server on the CPU, by the calls that tests/unit/sglang/test_profile.py
makes.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from pacs_megatron.config.schema import ProfileOptions
from pacs_megatron.errors import ExitCode
from pacs_megatron.sglang.api import SglangApi
from pacs_megatron.sglang.profile import ServerProfiler
from tests.integration.sglang.conftest import Lab, sample_requests
from tests.support.servers.fleet_run import FleetRun

pytestmark = [pytest.mark.sglang, pytest.mark.full, pytest.mark.timeout(3000)]


@pytest.mark.parametrize("num_forwards", [3, 10_000])
def test_a_trace_of_the_forward_passes(lab: Lab, tmp_path: Path, num_forwards: int) -> None:
    """The server ends the profile after 3 passes; with 10,000 the end of the step does."""
    options = ProfileOptions(steps=(2,), servers=True, server_forwards=num_forwards)
    api = SglangApi(url=lab.url)
    profiler = ServerProfiler(options, tmp_path / "profile", lambda: [api])
    with lab.opened(weights=0) as opened:
        for step in (1, 2):
            with profiler.step(step):
                requests = sample_requests(4, tokens=12, tag=f"profile-{num_forwards}-{step}")
                assert len(list(opened.engine.stream(requests))) == 4

    [file] = (tmp_path / "profile").iterdir()
    assert ".2-TP-0.trace.json.gz" in file.name
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {event["name"] for event in events}
    assert {"aten::mm", "aten::embedding"} & names or any("linear" in name for name in names)
    assert not api.stop_profile(60.0), "no profile is in progress"


def test_a_run_profiles_its_servers_and_ranks(lab: Lab, tmp_path: Path) -> None:
    rollout = {"engine": "sglang", "urls": [lab.url], "sync": {"transport": "disk"}}
    run = FleetRun(tmp_path, lab.folders[0], rollout, steps=2)
    run.start("observability.profile={steps: [2], servers: true, server_forwards: 5}")
    code, err = run.finish()
    assert code == ExitCode.OK, err
    files = sorted(path.name for path in (run.run_dir / "profile").iterdir())
    assert files[:2] == ["rank0.2.pt.trace.json.gz", "rank_times.jsonl"]
    assert len(files) == 3 and files[2].endswith(".2-TP-0.trace.json.gz")
    assert "servers and rewards" in (run.run_dir / "report.html").read_text()
