"""`paper` with its real commands: two methods, one seed, few steps; killed in the middle, resumed,
the same tables.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.support.studies import finish, short_study, start


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_killed_and_resumed_gives_the_same_tables(tmp_path: Path) -> None:
    configs = short_study(tmp_path)
    one = tmp_path / "one"
    other = tmp_path / "other"
    whole = finish(configs, one)
    assert "tiny-grpo-s0: train" in whole and "tiny-pacs-s0: diversity" in whole
    cells = json.loads((one / "table2.json").read_text())
    assert all(0 < cell["ours"][0] < 100 for cell in cells if cell["metric"] == "pass@1")
    assert len({tuple(cell["ours"]) for cell in cells}) > 3
    again = finish(configs, one)
    assert again == whole[whole.index("\ntable2") :]  # nothing runs
    for name in ("inputs", "warmstart"):  # as if made there: the folders are the same for both
        shutil.copytree(one / name, other / name)
    process = start(configs, other)
    metrics = other / "tiny-grpo-s0" / "metrics.jsonl"
    deadline = time.monotonic() + 1800
    while process.poll() is None and not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None and metrics.exists()
    process.send_signal(signal.SIGKILL)  # of `paper`: its run receives SIGTERM, saves and stops
    process.communicate(timeout=600)
    while time.monotonic() < deadline:
        out, err = start(configs, other).communicate(timeout=1800)
        if "is in use by" not in err:  # the run has stopped
            break
        time.sleep(1)
    assert "\ntable2" in out, err[-3000:]
    resumed = out[out.index("\ntable2") :].replace(str(other), str(one))
    assert resumed == again
    for name in ("table2", "table3", "figure5"):
        assert (one / f"{name}.json").read_bytes() == (other / f"{name}.json").read_bytes()
