"""`fetch` with the hub's real client against a loopback hub; then everything again without any
network.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.fault_fs import FaultyDisk
from tests.support.hub import COMMIT, LFS_SIZE, Hub, serve
from tests.support.ranks import free_port
from tests.support.tiny_models import make_tiny_qwen3
from tests.support.tiny_run import write_tiny_run

MODEL = "tiny/qwen3"
DATA = "tiny/sums"
OVERRIDES = (
    f"model.path={MODEL}",
    f"data.train.path={DATA}",
    "rollout.sampling.max_response_tokens=8",
    "run.steps=1",
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(model folder, data set folder) behind the hub."""
    folder = tmp_path_factory.mktemp("hub")
    model = make_tiny_qwen3(folder / "model")
    (model / "original").mkdir()
    (model / "original" / "consolidated.pth").write_bytes(b"not needed")
    data = folder / "data"
    data.mkdir()
    rows = []
    for a in range(4):
        for b in range(4):
            rows.append({"problem": f"{a} + {b} = ?", "answer": str(a + b)})
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model, data


@pytest.fixture
def hub(sources: tuple[Path, Path]) -> Iterator[Hub]:
    with serve({MODEL: sources[0], "Qwen/Qwen3-4B": sources[0]}, {DATA: sources[1]}) as hub:
        yield hub


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_tiny_run(tmp_path, tmp_path)


def call(
    tmp_path: Path,
    verb: str,
    config: Path,
    *overrides: str,
    url: str,
    offline: bool = False,
    environ: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """(exit code, standard output or the error) of the command as a user gives it."""
    env = {
        **(environ or {}),
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "SLURM_", "RANK"))
        },
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
    }
    if offline:
        env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pacs_megatron", verb, str(config), *overrides],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
def test_a_job_needs_no_network_after_it(hub: Hub, tmp_path: Path, config: Path) -> None:
    code, out = call(tmp_path, "fetch", config, *OVERRIDES, url=hub.url)
    assert code == 0, out
    assert f"model {MODEL}: " in out and f"data {DATA} (train): 16 rows" in out
    assert "model.safetensors" in hub.downloads and "original/consolidated.pth" not in hub.downloads
    before = len(hub.downloads)
    code, out = call(tmp_path, "fetch", config, *OVERRIDES, url=hub.url)
    assert code == 0, out
    assert hub.downloads[before:].count("model.safetensors") == 0  # a second call downloads nothing
    nobody = f"http://127.0.0.1:{free_port()}"
    # preflight reads the caches only, even without HF_HUB_OFFLINE.
    code, out = call(tmp_path, "preflight", config, *OVERRIDES, url=nobody)
    assert code == 0, out
    assert f"ok    data.train.path: {DATA}: 16 prompts" in out


@pytest.mark.full
def test_a_run_trains_from_the_caches(hub: Hub, tmp_path: Path, config: Path) -> None:
    assert call(tmp_path, "fetch", config, *OVERRIDES, url=hub.url)[0] == 0
    nobody = f"http://127.0.0.1:{free_port()}"
    code, out = call(
        tmp_path, "train", config, *OVERRIDES, "parallel.tp=1", url=nobody, offline=True
    )
    assert code == 0, out
    assert (tmp_path / "runs" / "tiny" / "hf" / "model.safetensors").is_file()


def test_one_file_of_a_data_set_with_a_script(hub: Hub, tmp_path: Path, config: Path) -> None:
    """As LiveCodeBench:

    `datasets` runs no loader script. Downloaded once, at the pinned revision, then read offline.
    """
    file = f"hf://datasets/{DATA}/train.jsonl"
    pinned = (*OVERRIDES, f"data.train.path={file}", f"data.train.revision={COMMIT}")
    code, out = call(tmp_path, "fetch", config, *pinned, url=hub.url)
    assert code == 0 and f"data {file} (train): 16 rows" in out, out
    nobody = f"http://127.0.0.1:{free_port()}"
    code, out = call(tmp_path, "preflight", config, *pinned, url=nobody, offline=True)
    assert code == 0 and f"ok    data.train.path: {file}: 16 prompts" in out, out
    for changes, expected in (
        (
            [f"data.train.path=hf://datasets/{DATA}/none.jsonl"],
            "no such file in the hub or the local cache",
        ),
        ([f"data.train.path=hf://datasets/{DATA}/train.csv"], "a file of the hub"),
        (["data.train.split=test"], "split=test is not used by a file"),
    ):
        code, out = call(tmp_path, "fetch", config, *pinned, *changes, url=hub.url)
        assert code != 0 and expected in out.splitlines()[-1] and "Traceback" not in out, out


def test_an_interrupted_download_resumes(
    sources: tuple[Path, Path], tmp_path: Path, config: Path
) -> None:
    """The client writes pieces of 10 MiB and resumes after the last complete one."""
    piece = 10 * 2**20
    model = shutil.copytree(sources[0], tmp_path / "large")
    (model / "notes.txt").write_bytes(os.urandom(piece + 4096))
    with serve({MODEL: model}, {DATA: sources[1]}) as hub:
        hub.cut_once["notes.txt"] = piece + 1000
        code, out = call(tmp_path, "fetch", config, *OVERRIDES, url=hub.url)
        assert code == 0, out
        assert ("notes.txt", f"bytes={piece}-") in hub.ranges
    (found,) = (tmp_path / "hf" / "hub").glob("models--tiny--qwen3/snapshots/*/notes.txt")
    assert found.read_bytes() == (model / "notes.txt").read_bytes()


@pytest.mark.full
def test_complete_files_are_kept_when_a_download_fails(
    hub: Hub, tmp_path: Path, config: Path
) -> None:
    hub.cut["model.safetensors"] = LFS_SIZE
    code, out = call(tmp_path, "fetch", config, *OVERRIDES, url=hub.url)
    assert code == 2, out
    assert "complete files are kept" in out.strip().splitlines()[-1]
    assert hub.downloads.count("tokenizer.json") == 1
    hub.cut.clear()
    code, out = call(tmp_path, "fetch", config, *OVERRIDES, url=hub.url)
    assert code == 0, out
    assert hub.downloads.count("tokenizer.json") == 1


def no_such_repository(_hub: Hub) -> tuple[str, ...]:
    return ("model.path=tiny/nothing",)


def gated(hub: Hub) -> tuple[str, ...]:
    hub.gated.add(MODEL)
    return ()


def broken(hub: Hub) -> tuple[str, ...]:
    hub.broken = True
    return ()


def larger_than_the_disk(hub: Hub) -> tuple[str, ...]:
    hub.announced["model.safetensors"] = 1 << 60
    return ()


def no_such_data(_hub: Hub) -> tuple[str, ...]:
    return ("data.train.path=tiny/nothing",)


def no_id(_hub: Hub) -> tuple[str, ...]:
    return ("model.path=models/of/mine",)


FAILURES = {
    no_such_repository: "model.path=tiny/nothing: http://127.0.0.1",
    gated: "accept its terms at",
    broken: "returned HTTP 500",
    larger_than_the_disk: "GiB more, but",
    no_such_data: "tiny/nothing",
    no_id: "neither a folder nor a hub id",
}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.__name__)
def test_what_fails_is_one_line(failure: object, hub: Hub, tmp_path: Path, config: Path) -> None:
    overrides = failure(hub)  # type: ignore[operator]
    code, out = call(tmp_path, "fetch", config, *OVERRIDES, *overrides, url=hub.url)
    errors = [line for line in out.splitlines() if "Error: " in line]
    assert code == 2, out
    assert len(errors) == 1 and FAILURES[failure] in errors[0], out  # type: ignore[index]
    assert "Traceback" not in out


def test_no_network_is_one_line(tmp_path: Path, config: Path) -> None:
    code, out = call(tmp_path, "fetch", config, *OVERRIDES, url=f"http://127.0.0.1:{free_port()}")
    assert (
        code == 2 and "is unreachable" in out and "HTTPS_PROXY" in out and "Traceback" not in out
    ), out
    code, out = call(tmp_path, "fetch", config, *OVERRIDES, url="http://127.0.0.1:9", offline=True)
    assert code == 2 and "HF_HUB_OFFLINE is set" in out


@pytest.mark.full
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    "part", ["", "hub/models--tiny--qwen3/blobs", "hub/models--tiny--qwen3/refs", "datasets"]
)
def test_a_cache_that_cannot_be_written_is_one_line(
    hub: Hub, tmp_path: Path, config: Path, error: int, part: str
) -> None:
    disk = FaultyDisk(tmp_path / "fault", tmp_path / "hf" / part)
    disk.fail(1, error=error)
    code, out = call(tmp_path, "fetch", config, *OVERRIDES, url=hub.url, environ=disk.environ)
    errors = [line for line in out.splitlines() if "Error: " in line]
    assert code in (1, 2) and len(errors) == 1 and os.strerror(error) in errors[0], out
    assert str(tmp_path / "hf") in errors[0] and "Traceback" not in out, out
    disk.fail(0)
    assert call(tmp_path, "fetch", config, *OVERRIDES, url=hub.url, environ=disk.environ)[0] == 0
