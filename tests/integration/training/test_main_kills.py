"""100 `kill -9` in five layouts, with the embedded engine and with SGLang from recorded samples;
same bits at the end.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kills import LAYOUTS


@pytest.mark.campaign
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_runs_end_with_the_same_bits(tmp_path: Path, layout: str) -> None:
    """PACS_KILL_LOG names a file for the lines of all layouts; kills in it are not repeated."""
    log = os.environ.get("PACS_KILL_LOG", str(tmp_path / "kills.jsonl"))
    subprocess.run(
        [sys.executable, "-m", "tests.support.kills", log, "--layouts", layout], check=True
    )
