"""`preflight` with the real server: a running server receives a request, a managed one is started
and stopped.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from pacs_megatron.workbench.preflight.check import Check
from pacs_megatron.workbench.preflight.run import run_preflight
from tests.integration.sglang.conftest import Lab
from tests.support.needs import require_sglang
from tests.support.tiny_run import write_tiny_run

pytestmark = pytest.mark.sglang


def checks_of(folder: Path, model: Path, rollout: str) -> dict[str, Check]:
    config = write_tiny_run(folder, model)
    found = run_preflight(
        config, [f"rollout={{engine: sglang, sampling: {{max_response_tokens: 8}}, {rollout}}}"]
    )
    assert not [str(check) for check in found if check.level == "fail"]
    return {check.key: check for check in found}


def test_a_running_server_gets_a_request(lab: Lab, tmp_path: Path) -> None:
    found = checks_of(tmp_path, lab.folders[0], f"urls: ['{lab.url}'], sync: {{transport: disk}}")
    assert (
        found["rollout.urls"].level == "ok"
        and f"{lab.url} responds in" in found["rollout.urls"].message
    )


@pytest.mark.full
def test_the_configured_server_is_started_and_ended(
    lab_folders: list[Path], tmp_path: Path
) -> None:
    servers = (
        f"servers: {{python: [{require_sglang()}], device: cpu, max_total_tokens: 4096}}, sync: "
        f"{{transport: disk}}"
    )
    found = checks_of(tmp_path, lab_folders[0], servers)
    assert found["rollout.servers.python"].level == "ok"
    assert found["rollout.servers"].level == "ok" and "ended" in found["rollout.servers"].message
    model = str(lab_folders[0])
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if model in " ".join(p.info["cmdline"] or [])
    ]
