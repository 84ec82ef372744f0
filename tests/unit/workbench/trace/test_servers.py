"""The traced sender of weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.ranks import search_path

ROOT = Path(__file__).parents[4]
# In a process of its own: the sender's functions are replaced for good.
SENDS = """
import sys, threading
from pathlib import Path

from pacs_megatron.config import load_config
from pacs_megatron.models import read_spec
from pacs_megatron.sglang.weights import server_sync, transports
from pacs_megatron.workbench.plan.known_models import need_config
from pacs_megatron.workbench.trace import servers

config = load_config(Path(sys.argv[1])).config
spec = read_spec(need_config(config.model.path, "model.path"))
servers._receiver(config.rollout.sglang, spec, Path(sys.argv[2]))
for module in (server_sync, transports):
    assert module.in_thread(threading.current_thread).result() is threading.main_thread(), module
"""


def test_nothing_is_sent_beside_the_export(tmp_path: Path) -> None:
    """Fake tensors are for one thread at a time: two fail in torch, or not, by chance."""
    config = ROOT / "configs" / "runs" / "grpo-qwen3-14b-7n8g-tp2-ahead.yaml"
    subprocess.run(
        [sys.executable, "-c", SENDS, str(config), str(tmp_path)],
        env={"PYTHONPATH": search_path(ROOT), "PATH": ""},
        cwd=ROOT,
        check=True,
        timeout=120,
    )
