"""The bar on a terminal, log lines elsewhere, and logging around both."""

import fcntl
import io
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from pacs_megatron.observability.logs import PROGRESS_LOGGER, LineFormatter, setup_logging
from pacs_megatron.observability.progress import (
    Console,
    Progress,
    format_duration,
    format_value,
    training_fields,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("pacs_megatron")
    before = (root.level, ours.level, list(root.handlers))
    yield
    for handler in set(root.handlers) - set(before[2]):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(before[0])
    ours.setLevel(before[1])


def run(stream: io.StringIO, log_dir: Path | None = None, *, seconds: float = 2.0, enabled: bool = True) -> str:
    clock = Clock()
    setup_logging(log_dir, rank=0, stream=stream)
    with Progress("step", 10, enabled=enabled, console=Console(stream=stream, clock=clock)) as progress:
        for step in range(1, 11):
            progress.phase(("rollout",))
            clock.now += seconds
            fields = {"reward": step / 10, "tokens/s": 1234.5}
            progress.advance(step, fields | ({"pass@1": 0.5} if step == 4 else {}))
    return stream.getvalue()


def test_plain_lines_when_no_terminal() -> None:
    lines = run(io.StringIO()).splitlines()
    # Every 5 s of 2 s steps: first, then every third, and the last.
    assert [re.search(r"step (\d+)/10", line)[1] for line in lines] == ["1", "4", "7", "10"]  # type: ignore[index]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[rank 0\] INFO step ", line) for line in lines)
    assert lines[0].endswith("reward 0.100  tokens/s 1,234  left 18s")
    assert lines[2].endswith("reward 0.700  tokens/s 1,234  pass@1 0.500  left 6s"), "an evaluation stays shown"
    assert "left" not in lines[3]


def test_one_bar_on_a_terminal_and_the_lines_only_in_the_file(tmp_path: Path) -> None:
    shown = run(Terminal(), tmp_path)
    assert "INFO" not in shown
    assert shown.count("\n") == 1, "one bar, ended once"
    last = shown.rstrip("\n").split("\r")[-1]
    assert "step 10/10" in last
    assert "reward 1.000" in last
    assert "pass@1 0.500" in last
    assert "rollout" not in last
    assert any("step 3/10" in frame and "rollout" in frame for frame in shown.split("\r"))
    assert "step 10/10 reward 1.000" in (tmp_path / "rank0.log").read_text()


def test_a_message_goes_above_the_bar() -> None:
    stream = Terminal()
    setup_logging(None, rank=0, stream=stream)
    with Progress("step", 2, console=Console(stream=stream)) as progress:
        progress.advance(1)
        logging.getLogger("pacs_megatron.training").warning("server 3 is down")
        progress.advance(2)
    assert re.search(r"\r[^\n]*\[rank 0\] WARNING server 3 is down\n", "\r" + stream.getvalue())


@pytest.mark.parametrize("columns", [0, 120])
def test_on_a_real_terminal(columns: int) -> None:
    """A pseudo-terminal; in some containers it has no width."""
    script = (
        "from pacs_megatron.observability.progress import Progress\n"
        "with Progress('step', 3) as p:\n"
        "    for i in (1, 2, 3): p.advance(i, {'reward': i / 3})\n"
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0))
    try:
        subprocess.run([sys.executable, "-c", script], check=True, stderr=theirs)
        seen = os.read(ours, 65536).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    frame = seen.replace("\r\n", "").split("\r")[-1]
    assert "step 3/3" in frame
    assert "reward 1.000" in frame
    assert len(frame) <= (columns or 80)


def test_disabled_shows_nothing() -> None:
    assert run(io.StringIO(), enabled=False) == ""
    assert run(Terminal(), enabled=False) == ""


@pytest.mark.parametrize("name", ["pacs_megatron.training", PROGRESS_LOGGER])
def test_a_console_that_has_gone_ends_nothing(name: str, tmp_path: Path) -> None:
    stream = io.StringIO()
    setup_logging(tmp_path, rank=0, stream=stream)
    stream.close()
    logging.getLogger(name).info("still in the file")
    assert "still in the file" in (tmp_path / "rank0.log").read_text()


def test_bytes_show_gigabytes_and_speed() -> None:
    stream, clock = io.StringIO(), Clock()
    setup_logging(None, rank=0, stream=stream)
    progress = Progress("convert", 4 * 10**9, unit="bytes", console=Console(stream=stream, clock=clock))
    clock.now += 2.0
    progress.advance(10**9)
    assert "convert 1.00/4.00 GB 0.50 GB/s  left 6s" in stream.getvalue()


def test_time_left_counts_from_where_a_run_resumes() -> None:
    clock = Clock()
    progress = Progress("step", 100, done=90, enabled=False, console=Console(clock=clock))
    assert progress.seconds_left is None
    clock.now += 3.0
    progress.advance(91)
    assert progress.seconds_left == pytest.approx(27.0)
    clock.now += 13.0  # a slow step moves the average by its weight: 0.3 * 13 + 0.7 * 3 seconds a step
    progress.advance(92)
    assert progress.seconds_left == pytest.approx(8 * 6.0)


def test_training_fields() -> None:
    row = {
        "step": 1,
        "reward/mean": 0.5,
        "objective/loss": 0.7,
        "eval/a/pass@1": 0.2,
        "eval/b/pass@1": 0.4,
        "eval/b/pass@16": 1.0,
        "eval/b/pass@1_se": 9.0,
    }
    assert training_fields(row) == {"reward": 0.5, "pass@1": pytest.approx(0.3)}
    assert training_fields({"step": 1, "reward/mean": None, "tokens_per_s": 7.0}) == {"tokens/s": 7.0}
    assert training_fields({"step": 1, "objective/loss": 0.7}) == {"loss": 0.7}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (273600, "3d04h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_values() -> None:
    assert [format_value(v) for v in (0.71234, 12.345, 1234.5, 8, -0.5)] == ["0.712", "12.3", "1,234", "8", "-0.500"]


def test_a_message_cannot_forge_a_line_or_move_the_cursor() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "a\nb\x1b[2K\r\u2028%s", ("c\u0085d",), None)
    text = LineFormatter(3).format(record)
    assert text.endswith(r"[rank 3] INFO a\nb\x1b[2K\r\u2028c\x85d")


def test_other_ranks_only_warn_on_the_console_but_log_all_to_their_file(tmp_path: Path) -> None:
    stream = io.StringIO()
    setup_logging(tmp_path, rank=2, stream=stream)
    logger = logging.getLogger("pacs_megatron.x")
    logger.info("quiet")
    logger.warning("loud \udc80")
    logging.getLogger("elsewhere").info("chatter")
    assert re.fullmatch(r".*\[rank 2\] WARNING loud .*\n", stream.getvalue())
    content = (tmp_path / "rank2.log").read_text()
    assert "INFO quiet" in content
    assert "chatter" not in content


def test_setup_twice_does_not_double_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    for _ in range(2):
        setup_logging(tmp_path, rank=0, stream=stream)
    logging.getLogger("pacs_megatron.x").info("once")
    assert stream.getvalue().count("once") == 1
    assert (tmp_path / "rank0.log").read_text().count("once") == 1


def test_sampling_is_rarely_a_log_line_where_there_is_no_bar(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    progress = Progress("run", 4, console=Console(stream=io.StringIO(), clock=lambda: now[0]))
    with caplog.at_level(logging.INFO):
        for second in range(0, 95, 5):
            now[0] = float(second)
            progress.samples(("rollout",), 10 * second, 1000)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"run 0/4 rollout {done}/1000" for done in (300, 600, 900)]


def test_torch_does_not_warn_of_a_cuda_home_without_a_gpu(tmp_path: Path) -> None:
    code = (
        "import torch; torch.cuda.is_available = lambda: False\n"
        "from pacs_megatron.observability.logs import setup_logging\n"
        "setup_logging(None, 0)\n"
        "from torch.utils import cpp_extension\n"
        "assert cpp_extension._find_cuda_home() == '/nowhere'\n"
    )
    environment = {**os.environ, "CUDA_HOME": "/nowhere"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
