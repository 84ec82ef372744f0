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
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pacs_megatron.observability.logs import (
    PROGRESS_LOGGER,
    LineFormatter,
    setup_command_logging,
    setup_logging,
)
from pacs_megatron.observability.progress import (
    Progress,
    format_value,
    training_fields,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """The clock of tqdm."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("tqdm.std.time", self)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    ours = logging.getLogger("pacs_megatron")
    before = (root.level, ours.level, list(root.handlers))
    yield
    for handler in set(root.handlers) - set(before[2]):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(before[0])
    ours.setLevel(before[1])


def run(stream: io.StringIO, clock: Clock, log_dir: Path | None = None) -> str:
    setup_logging(log_dir, rank=0, stream=stream)
    with Progress("step", 10, stream=stream) as progress:
        for step in range(1, 11):
            progress.phase(("rollout",))
            clock.now += 2.0
            fields = {"reward": step / 10, "tokens/s": 1234.5}
            progress.advance(step, fields | ({"pass@1": 0.5} if step == 4 else {}))
            progress.phase(())
    return stream.getvalue()


def test_without_a_terminal_it_logs_lines(clock: Clock) -> None:
    lines = run(io.StringIO(), clock).splitlines()
    # Steps of 2 s, a line every 5 s: the first, then every third, and the last.
    assert [re.search(r"step (\d+)/10", line)[1] for line in lines] == ["1", "4", "7", "10"]  # type: ignore[index]
    assert all(
        re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[rank 0\] INFO step ", line) for line in lines
    )
    assert lines[0].endswith(
        "step 1/10, 2.00s/step, 00:18 left, reward 0.100, tokens/s 1,234, rollout"
    )
    assert "reward 0.400, tokens/s 1,234, pass@1 0.500" in lines[1]
    assert "00:06 left, reward 0.700, tokens/s 1,234, rollout" in lines[2], (
        "pass@1 is shown where it was measured"
    )
    assert "00:00 left" in lines[3]


def test_on_a_terminal_it_draws_one_bar_and_logs_lines_to_the_file_only(
    clock: Clock, tmp_path: Path
) -> None:
    shown = run(Terminal(), clock, tmp_path)
    assert "INFO" not in shown
    assert shown.count("\n") == 1, "one bar, ended once"
    last = shown.rstrip("\n").split("\r")[-1]
    assert "step 10/10" in last
    assert "reward 1.000" in last
    assert "rollout" not in last
    assert (
        "step 10/10, 2.00s/step, 00:00 left, reward 1.000" in (tmp_path / "rank0.log").read_text()
    )


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_a_bar_of_every_width_has_bar_and_phase(
    columns: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pacs_megatron.observability.progress.REDRAW_S", -1.0)
    monkeypatch.setattr("pacs_megatron.observability.progress._columns", lambda _: columns)
    stream = Terminal()
    with Progress("pacs-qwen3-14b-2n8g-tp4-of-the-study", 1000, stream=stream) as progress:
        clock.now += 4321.0
        fields = {"reward": 0.5, "pass@1": 0.25, "tokens/s": 123456.0}
        progress.advance(12, fields)
        progress.phase(("rollout", "rewards"))
        last = stream.getvalue().split("\r")[-1]
    assert len(last) <= columns
    assert re.match(r"pacs-qwen3-14b-… 12/1000 \|", last)
    assert "rollout rewards" in last or columns == 60
    bar = last.split("|")[1]
    assert len(bar) >= 8 or columns == 60
    assert ("tokens/s 123,456" in last) == (columns == 140)


def test_a_bar_is_drawn_at_most_twice_a_second(clock: Clock) -> None:
    stream = Terminal()
    start = time.monotonic()
    with Progress("step", 10**6, stream=stream) as progress:
        for step in range(3000):
            progress.phase(("update", str(step)))
            progress.advance(step)
        lasted_s = time.monotonic() - start
    # The first, one every half second, and the end, which tqdm draws twice.
    assert stream.getvalue().count("step ") <= 4 + 2 * lasted_s


def test_the_last_state_is_drawn_late() -> None:
    stream = Terminal()
    with Progress("step", 10, stream=stream) as progress:
        progress.advance(1)
        progress.phase(("a long update",))
        assert "a long update" not in stream.getvalue()
        while "a long update" not in stream.getvalue():
            time.sleep(0.05)


def test_a_message_goes_above_the_bar() -> None:
    stream = Terminal()
    setup_logging(None, rank=0, stream=stream)
    with Progress("step", 2, stream=stream) as progress:
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
    fcntl.ioctl(
        theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0)
    )
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


@pytest.mark.parametrize("name", ["pacs_megatron.training", PROGRESS_LOGGER])
def test_a_closed_console_does_not_stop_logging(name: str, tmp_path: Path) -> None:
    stream = io.StringIO()
    setup_logging(tmp_path, rank=0, stream=stream)
    stream.close()
    logging.getLogger(name).info("still in the file")
    assert "still in the file" in (tmp_path / "rank0.log").read_text()


def test_bytes_show_gigabytes_and_speed(clock: Clock) -> None:
    stream = io.StringIO()
    setup_logging(None, rank=0, stream=stream)
    progress = Progress("convert", 4 * 10**9, unit="bytes", stream=stream)
    clock.now += 2.0
    progress.advance(10**9)
    assert re.search(r"convert 1.00G/4.00G, 500MB/s, 00:0[56] left", stream.getvalue())


def test_an_evaluation_counts_samples(clock: Clock) -> None:
    stream = io.StringIO()
    setup_logging(None, rank=0, stream=stream)
    progress = Progress("eval", 48, unit="sample", stream=stream)
    clock.now += 2.0
    progress.advance(24)
    assert "eval 24/48, 12.00sample/s, 00:02 left" in stream.getvalue()


def test_time_left_counts_from_the_step_of_the_resume(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    progress = Progress("step", 100, done=90, stream=io.StringIO())
    with caplog.at_level(logging.INFO):
        clock.now += 3.0
        progress.advance(91)
        clock.now += 13.0
        progress.advance(92)
    assert re.fullmatch("step 91/100, 3.00s/step, 00:2[67] left", caplog.messages[0])
    # tqdm's unbiased moving average: (0.3 * 13 + 0.7 * 0.3 * 3) / (0.3 + 0.7 * 0.3) seconds a step.
    assert re.fullmatch("step 92/100, 8.88s/step, 01:1[01] left", caplog.messages[1])


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
    assert training_fields({"step": 1, "reward/mean": None, "tokens_per_s": 7.0}) == {
        "tokens/s": 7.0
    }
    assert training_fields({"step": 1, "objective/loss": 0.7}) == {"loss": 0.7}


def test_values() -> None:
    assert [format_value(v) for v in (0.71234, 12.345, 1234.5, 8, -0.5)] == [
        "0.712",
        "12.3",
        "1,234",
        "8",
        "-0.500",
    ]


def test_a_message_cannot_forge_a_line_or_move_the_cursor() -> None:
    record = logging.LogRecord(
        "x", logging.INFO, "f", 1, "a\nb\x1b[2K\r\u2028%s", ("c\u0085d\u202ee",), None
    )
    text = LineFormatter(3).format(record)
    assert text.endswith(r"[rank 3] INFO a\nb\x1b[2K\r\u2028c\x85d\u202ee")


def test_a_command_prints_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    setup_command_logging()
    logging.getLogger("pacs_megatron.x").warning("waiting for a\x1b[2K: %d s", 4)
    logging.getLogger("pacs_megatron.x").info("written")
    logging.getLogger("elsewhere").info("chatter")
    assert capsys.readouterr().err == "waiting for a\\x1b[2K: 4 s\nwritten\n"


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


def test_sampling_logs_a_line_every_8_s_without_a_terminal(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    progress = Progress("run", 4, stream=io.StringIO())
    with caplog.at_level(logging.INFO):
        for second in range(0, 26, 2):
            clock.now = float(second)
            progress.samples(("rollout",), 10 * second, 1000)
    assert caplog.messages == [f"run 0/4 rollout {done}/1000" for done in (80, 160, 240)]


def test_a_full_disk_under_the_log_file_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.log").symlink_to("/dev/full")
    setup_logging(tmp_path, 0, stream=io.StringIO())
    for number in range(3):
        logging.getLogger("pacs_megatron").info("line %d", number)
    (line,) = capfd.readouterr().err.splitlines()
    assert "rank0.log: lines are missing" in line and "No space left" in line
