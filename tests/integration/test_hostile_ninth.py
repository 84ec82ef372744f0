"""A ninth set: a user who breaks what lies between the parts.

Folders of data, explosions of numbers, permissions, tools.

Written before a case of it ran; `test_hostile_ninth_runs.py` and `_states.py` have the processes of
this set.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.test_hostile_files import link, pipe, text, together
from tests.integration.test_hostile_services import drip, serving
from tests.integration.test_hostile_verbs import RUNS, SAMPLE, TWO
from tests.support import hostile
from tests.support.hostile import Arrange, Outcome, World, copy_world, run


# ------------------------------------------------------------------------------------------------------------
# the judge
@dataclass(frozen=True)
class Try:
    """Actions of a user. {w}orld, {r}un file, {m}odel and {c}heckpoint are replaced in `words`."""

    words: tuple[str, ...] | str
    """of one command, or a shell script with the program as `$P`"""
    arrange: Arrange = lambda world: None
    end: str = "error"
    """error: one clear line and a non-zero exit; works: 0; either"""
    after: Callable[[World, Outcome], object] | None = None
    codes: tuple[int, ...] = ()
    """exit codes of a script that need no error line"""


NOISE = (
    "logs",
    "heartbeats",
    "run.lock",
    "exit_code",
    "report.html",
    "environment.json",
    "config.yaml",
    "STOP",
)
"""Names that a run may write before it fails"""
WRONG = (
    "Traceback",
    "InternalError",
    "Exception ignored",
    "BrokenPipe",
    "Fatal Python",
    "core dumped",
)


def _state(world: World) -> dict[Path, bytes]:
    """Every regular file of the world that no failing command may change."""
    runs = world.folder / "runs"
    found = (path for path in world.folder.rglob("*") if path.is_file() and not path.is_symlink())
    kept = (
        path
        for path in found
        if runs not in path.parents or not set(NOISE) & set(path.relative_to(runs).parts)
    )
    return {path: path.read_bytes() for path in kept if path.stat().st_size < 64 << 20}


def _left(world: World) -> list[int]:
    """Processes of this world that still run: their temporary folder is in it."""
    found = []
    mark = str(world.folder).encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if (
                    mark in (entry / "environ").read_bytes()
                    and (entry / "stat").read_text().split()[2] != "Z"
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _end(world: World) -> None:
    for pid in _left(world):
        try:
            os.kill(pid, 9)
        except OSError:
            continue


def _exit(attempt: Try, words: list[Any], outcome: Outcome) -> list[str]:
    """Faults of the exit code and of the text"""
    errors = hostile._ERROR.findall(outcome.text)
    code = outcome.code
    faults = [word for word in WRONG if word in outcome.text]
    if code is None:
        faults.append("hangs")
    elif code == 0 and attempt.end == "error" and 0 not in attempt.codes:
        faults.append("accepted")
    elif code and attempt.end == "works" and code not in attempt.codes:
        faults.append(f"failed with {code}")
    elif code and code not in attempt.codes and not (errors and 0 < code < 128):
        faults.append(f"{len(errors)} errors, code {code}")
    if len(errors) > 1 and "preflight" not in str(words):
        faults.append(f"{len(errors)} errors")
    lines = [
        line
        for line in outcome.text.split("\n")
        if line.strip() and not hostile._LOG_LINE.match(line)
    ]
    if (
        code
        and isinstance(attempt.words, tuple)
        and len(lines) > 1
        and words[0] in hostile._ONE_LINE
    ):
        faults.append(f"{len(lines)} lines")
    return faults


def _traces(
    attempt: Try, world: World, outcome: Outcome, before: dict[Path, bytes], names: set[Path]
) -> list[str]:
    """Faults of the time, the memory and the files"""
    faults = []
    if outcome.silence_s - outcome.starved_s > hostile.SILENCE_S:
        faults.append(f"silent for {outcome.silence_s:.0f} s")
    if outcome.memory_bytes > hostile.MEMORY_BYTES // 2 or "MemoryError" in outcome.text:
        faults.append(f"{outcome.memory_bytes >> 20} MiB of memory")
    if (world.folder / "canary").exists():
        faults.append("a canary")
    failed = outcome.code and outcome.code not in attempt.codes
    given = (path for path in before if failed or world.folder / "runs" not in path.parents)
    after = _state(world)
    faults += [
        f"lost {path.relative_to(world.folder)}"
        for path in given
        if after.get(path) != before[path]
    ]
    if outcome.code and (world.folder / "o").exists():
        faults.append("left something behind")
    return faults + [
        f"half-written {path.name}"
        for path in set(world.folder.rglob("*")) - names
        if ".partial" in path.name
    ]


def judge(name: str, attempt: Try, world: World) -> None:
    """Runs what the user does in `world` and asserts that it ends as it should."""
    attempt.arrange(world)
    places = {"{w}": world.folder, "{r}": world.run, "{m}": world.model, "{c}": world.checkpoint}

    def placed(word: str) -> str:
        for key, value in places.items():
            word = word.replace(key, str(value))
        return word

    before = _state(world)
    names = set(world.folder.rglob("*"))
    rescue = threading.Timer(hostile.LIMIT_S + 20, _end, (world,))
    rescue.start()
    words = (
        ["sh", "-c", placed(attempt.words)]
        if isinstance(attempt.words, str)
        else [*map(placed, attempt.words)]
    )
    outcome = run(words, world.folder, {})  # type: ignore[arg-type]
    rescue.cancel()
    end = time.monotonic() + 45
    while (left := _left(world)) and time.monotonic() < end:
        time.sleep(0.5)
    _end(world)
    faults = _exit(attempt, words, outcome) + _traces(attempt, world, outcome, before, names)
    if left:
        faults.append(f"processes {left} stay")
    if attempt.after and not faults:
        try:
            attempt.after(world, outcome)
        except AssertionError as error:
            faults.append(f"result: {str(error)[:300]}")
    if hostile.LOG:
        line = next(
            (line for line in outcome.text.splitlines() if hostile._ERROR.match(line)),
            outcome.text[-200:],
        )
        with Path(hostile.LOG).open("a") as file:
            file.write(
                f"{', '.join(faults) or 'ok'} | {name} | code {outcome.code}, "
                f"{outcome.wall_s:.0f} s, silence "
                f"{outcome.silence_s:.0f} s, {outcome.memory_bytes >> 20} MiB | "
                f"{line.replace(str(world.folder), '.')[:240]!r}\n"
            )
    assert not faults, f"{faults}\n{outcome.text[-4000:]}"


def in_copy(name: str, attempt: Try, original: World, folder: Path) -> None:
    world = copy_world(original, folder / "world")
    try:
        judge(name, attempt, world)
    finally:
        shutil.rmtree(world.folder, ignore_errors=True)


def no_escape(world: World, outcome: Outcome) -> None:
    assert "\x1b" not in outcome.text, "an escape reached the terminal"


# -----------------------------------------------------------------------------------------------------------------
# data
PREVIEW = ("data", "preview", "{r}")
SHOW = ("config", "show", "{r}")
D = "data.train.path={w}/d"
ROWS = [{"problem": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(8)]


def lines(name: str, rows: list[Any]) -> Arrange:
    return text(name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def parquet(**columns: Any) -> Arrange:
    def write(world: World) -> None:
        import pyarrow
        from pyarrow import parquet as files

        files.write_table(pyarrow.table(columns), world.folder / "d.parquet")

    return write


def archive(name: str, entry: str, content: str) -> Arrange:
    def write(world: World) -> None:
        world.text(name, "")
        with zipfile.ZipFile(world.folder / name, "w") as file:
            file.writestr(entry, content)

    return write


def evil_pickle(name: str) -> Arrange:
    return lambda w: w.text(name, f"cposix\nsystem\n(S'touch {w.folder}/canary'\ntR.")


def _categories() -> Any:
    import pyarrow

    return pyarrow.array([row["problem"] for row in ROWS]).dictionary_encode()


def _large() -> Any:
    import pyarrow

    return pyarrow.array([row["answer"] for row in ROWS], pyarrow.large_string())


def count(number: int) -> Callable[[World, Outcome], object]:
    def counted(world: World, outcome: Outcome) -> None:
        assert f"{number} rows" in outcome.text, outcome.text

    return counted


PARQUET = (*PREVIEW, D + ".parquet")
QUICK: dict[str, Try] = {
    "data: a folder with a pickle": Try((*PREVIEW, D), evil_pickle("d/train.pkl")),
    "data: a folder with a script": Try((*PREVIEW, D), together(text("d/d.py", "open('canary', "
                                                                               "'w')\n"), lines("d/train.jsonl", ROWS)), "either"),
    "data: a folder whose card names another file": Try((*PREVIEW, D), text("d/README.md", "---\nconfigs:\n- config_name: default\n  data_files: ../tiny.yaml\n---\n")),
    "data: an archive that climbs": Try((*PREVIEW, D), archive("d/train.zip", "../../canary", "{}"), "either"),
    "data: a folder of shards of a pickle's name": Try((*PREVIEW, D), together(evil_pickle("d/train-00000-of-00002.pkl"), lines("d/train-00001-of-00002.jsonl", ROWS)), "either"),
    "data: an archive of web data with a pickle": Try((*PREVIEW, D), lambda w: _tar(w), "either"),
    "parquet: a chat as the problem": Try(PARQUET, parquet(problem=[[{"role": "user", "content": "1"}]], answer=["1"])),
    "parquet: an answer of nan": Try(PARQUET, parquet(problem=["1"] * 8, answer=[float("nan")] * 8)),
    "parquet: categories and large text": Try(PARQUET, lambda w: parquet(problem=_categories(), answer=_large())(w), "works", count(8)),
    "parquet: numbers as answers": Try(PARQUET, parquet(problem=[row["problem"] for row in ROWS], answer=list(range(8))), "either"),
    "parquet: times as answers": Try(PARQUET, lambda w: parquet(problem=["1"] * 8, answer=np.arange(8).astype("datetime64[s]"))(w), "either"),
    "json: columns of lists": Try((*PREVIEW, D + ".json"), text("d.json", json.dumps({"problem": ["1", "2"], "answer": ["1", "2"]}))),
    "lines: separators of Unicode in a problem": Try((*PREVIEW, D + ".jsonl"), lines("d.jsonl", [row | {"problem": row["problem"] + "a\u2028b\u2029c\u0085d"} for row in ROWS]), "works", count(8)),
    "lines: an escape in a problem and its answer": Try((*PREVIEW, D + ".jsonl"), lines("d.jsonl", [{"problem": f"\x1b]0;own\x07{n}", "answer": f"\x1b[2J{n}"} for n in range(8)]), "works", no_escape),
    "lines: a problem of 60 MB": Try((*PREVIEW, D + ".jsonl"), lines("d.jsonl", [*ROWS, {"problem": "x" * 60_000_000, "answer": "1"}]), "either"),
    "lines: 30,000 equal rows": Try((*PREVIEW, D + ".jsonl"), lines("d.jsonl", ROWS * 3_750), "either"),
    "lines: answers of numbers and of text": Try((*PREVIEW, D + ".jsonl"), lines("d.jsonl", [row | {"answer": int(row["answer"]) if n % 2 else row["answer"]} for n, row in enumerate(ROWS)]), "either"),
    "data: a suffix of a million letters": Try(PREVIEW, lambda w: w.config(data__prompt_suffix="x" * 200_000), "either"),
    # ------------------------------------------------------------------------------------------
    # YAML, overrides, numbers
    "override: 5,000 parts": Try((*SHOW, "run" + ".a" * 5000 + "=1")),
    "override: item 1,000,000,000": Try((*SHOW, "evaluation.benchmarks.1000000000.path=x")),
    "override: item -1": Try((*SHOW, "evaluation.benchmarks.-1.path=x")),
    "override: 20,000 of them": Try((*SHOW, *(f"run.seed={n}" for n in range(20_000))), end="either"),
    "sweep: 2.5 million runs": Try(("submit", "{r}", "--cluster", "local", "--dry-run", *(word for key in ("run.seed", "objective.beta", "optimizer.lr", "batch.updates_per_step") for word in ("--sweep", f"{key}=" + ",".join(map(str, range(1, 41))))))),
    "sweep: a command in a prompt": Try(("submit", "{r}", "--cluster", "local", "--dry-run", "--sweep", "data.system_prompt='$(touch {w}/canary)','`touch {w}/canary`'"), end="either"),
    "submit: a time of two lines": Try(("submit", "{r}", "--cluster", "local", "--dry-run", 'resources.time_limit="1:00:00\\n#SBATCH --wrap=id"')),
    "submit: a name that is an option": Try(("submit", "{r}", "--cluster", "local", "--dry-run", "run.name=-rf"), end="either"),
    "YAML: 60,000 dashes": Try(("config", "show", "{w}/y.yaml"), text("y.yaml", "- " * 60_000)),
    "YAML: 60,000 questions": Try(("config", "show", "{w}/y.yaml"), text("y.yaml", "? " * 60_000)),
    "YAML: 100,000 items": Try(("config", "show", "{w}/y.yaml"), text("y.yaml", "x: [" + "a," * 100_000 + "]")),
    "YAML: an include through a ring of folders": Try(("config", "show", "{w}/y.yaml"), together(link("d", "."), text("y.yaml", "include: [d/y.yaml]\n"))),
    "YAML: one include 50,000 times": Try(("config", "show", "{w}/y.yaml"), text("y.yaml", "include: [" + "z.yaml," * 30_000 + "]\n"), "error"),
    "preview: 1e9 prompts a step": Try((*PREVIEW, "batch.prompts_per_step=1000000000"), end="works"),
    "explain: 1e9 prompts a step": Try(("config", "explain", "{r}", "batch.prompts_per_step=1000000000"), end="either"),
    "plan: responses of 1e9 tokens": Try(("plan", "{r}", "rollout.sampling.max_response_tokens=1000000000"), end="either"),
    "plan: 1e9 samples a prompt": Try(("plan", "{r}", "batch.samples_per_prompt=1000000000"), end="either"),
    "plan: a search on 65,536 nodes": Try(("plan", "{r}", "--search", "resources.nodes=65536", "resources.gpus_per_node=8"), end="either"),
    "plan: a comparison of a run without GPUs": Try(("plan", "{r}", "--compare", "--search"), end="either"),
    # -----------------------------------------------------------------------------------------------------
    # results of runs
    "compare: names with a script": Try(("compare", *RUNS, "--out", "{w}/page"), together(TWO, lambda w: _named(w, "</script><script>alert(1)</script>")), "either", lambda w, o: _page(w, o)),
    "compare: a name with a command of LaTeX": Try(("compare", *RUNS, "--out", "{w}/page", "--latex", "{w}/t.tex"), together(TWO, lambda w: _named(w, "\\input{/etc/passwd} 50 % $x$")), "either", lambda w, o: _table(w, o)),
    "diversity: vectors over other arrays": Try(("diversity", *RUNS, "--embedder", "hashed", "--out", "{w}/page", "--save", "{w}/x.npz"), together(TWO, lambda w: np.savez(w.folder / "x.npz", weights=np.ones(9)))),
    "diversity: responses of nothing": Try(("diversity", *RUNS, "--embedder", "hashed", "--out", "{w}/page"), together(TWO, lambda w: _samples(w, [SAMPLE | {"response": ""}, SAMPLE | {"id": "1:x/0#1", "response": ""}])), "either"),
    "diversity: separators of Unicode in a response": Try(("diversity", *RUNS, "--embedder", "hashed", "--out", "{w}/page"), together(TWO, lambda w: _samples(w, [SAMPLE | {"response": "a\u2028b\u0085c"}, SAMPLE | {"id": "1:x/0#1", "response": "z\u2029"}])), "works"),
    "diversity: an embedder of a pickle": Try(("diversity", *RUNS, "--embedder", "{w}/e", "--out", "{w}/o"), together(TWO, lambda w: shutil.copytree(w.model, w.folder / "e"), lambda w: (w.folder / "e/model.safetensors").unlink(), evil_pickle("e/pytorch_model.bin"))),
    "diversity: an embedder with modules of its own": Try(("diversity", *RUNS, "--embedder", "{w}/e", "--out", "{w}/page"), together(TWO, lambda w: shutil.copytree(w.model, w.folder / "e"), text("e/modules.json", '[{"idx": 0, "name": "0", "path": "", "type": "evil.Module"}]'), text("e/evil.py", "open('canary', 'w')\n")), "either"),
    "status: escapes in a metric and a configuration": Try(("status", "{w}/runs/a"), together(TWO, text("runs/a/metrics.jsonl", json.dumps({"step": 1, "reward/mean": 0.5, "\x1b]0;own\x07": 1.0, "loss\x1b[2J": 2}) + "\n"), text("runs/a/config.yaml", 'run: {name: "\\e[2J", seed: 1}\n')), "either", no_escape),
    "status: a heartbeat that is a pipe": Try(("status", "{w}/runs/a"), together(TWO, pipe("runs/a/heartbeats/rank0.json")), "either"),
    "status: an exit code that is a pipe": Try(("status", "{w}/runs/a"), together(TWO, pipe("runs/a/exit_code")), "either"),
    "status: a lock that is a pipe": Try(("status", "{w}/runs/a"), together(TWO, pipe("runs/a/run.lock")), "either"),
    "status: gigabytes of metrics": Try(("status", "{w}/runs/a"), together(TWO, lambda w: os.truncate(w.folder / "runs/a/metrics.jsonl", 3 << 30)), "either"),
    "status: checkpoints in a ring": Try(("status", "{w}/runs/a"), together(TWO, link("runs/a/checkpoints", "checkpoints")), "either"),
    "cancel: a request that is a folder of another run": Try(("cancel", "--save", "{w}/runs/a"), together(TWO, link("runs/a/STOP", "../../train.jsonl")), "either"),
    "paper: a run that is a pipe": Try(("paper", "table1", "--scale", "laptop", "--dry-run", "--dir", "{w}/p"), pipe("p/tiny-pacs-s0"), "either"),
    "paper: an exit code and results of nonsense": Try(("paper", "table1", "--scale", "laptop", "--dry-run", "--dir", "{w}/p"), together(text("p/tiny-pacs-s0/exit_code", "zero"), text("p/tiny-pacs-s0/config.yaml", "[1"), text("p/tiny-pacs-s0/eval/results.json", "[1]"), text("p/tiny-base/eval/results.json", '{"metrics": 7}')), "either"),
    "paper: inputs behind a dangling link": Try(("paper", "table1", "--scale", "laptop", "--dry-run", "--dir", "{w}/p"), together(text("p/x", ""), link("p/inputs", "nowhere")), "either"),
    # ---------------------------------------------------------------------------------------------------------------
    # models
    "model: a shard upwards": Try(("convert", "to-megatron", "--hf", "{m}", "--out", "{w}/o"), lambda w: _sharded(w, "../model.safetensors")),
    "model: a shard that has no such tensor": Try(("convert", "to-megatron", "--hf", "{m}", "--out", "{w}/o"), lambda w: _sharded(w, "b.safetensors", other=True)),
    "model: links into a cache of blobs": Try(("convert", "to-megatron", "--hf", "{m}", "--out", "{w}/new"), lambda w: _blobs(w), "works"),
    "model: a length of nothing": Try(("convert", "to-megatron", "--hf", "{m}", "--out", "{w}/o"), lambda w: w.model_json("config.json", max_position_embeddings=0)),
    "model: a theta of 1e-320": Try(("convert", "to-megatron", "--hf", "{m}", "--out", "{w}/o"), lambda w: w.model_json("config.json", rope_theta=1e-320, rope_parameters={"rope_type": "default", "rope_theta": 1e-320})),
    "model: a header of 200,000 tensors": Try(("convert", "to-megatron", "--hf", "{m}", "--out", "{w}/o"), lambda w: w.header(lambda h: h | {f"x{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(200_000)})),
    "checkpoint: a part that lies elsewhere": Try(("convert", "to-hf", "--checkpoint", "{c}", "--out", "{w}/new"), lambda w: (shutil.move(w.checkpoint / "dist/__0_0.distcp", w.folder / "part"), link("checkpoint/dist/__0_0.distcp", "{w}/part")(w)), "works"),
    "convert: an output with a line end and an escape": Try(("convert", "to-hf", "--checkpoint", "{c}", "--out", "{w}/a\n\x1b[2Jb"), end="either", after=no_escape),
}  # fmt: skip


def _tar(world: World) -> None:
    import tarfile

    world.text("0.pkl", f"cposix\nsystem\n(S'touch {world.folder}/canary'\ntR.")
    world.text("0.json", json.dumps(ROWS[0]))
    world.text("d/x", "")
    (world.folder / "d/x").unlink()
    with tarfile.open(world.folder / "d/train.tar", "w") as file:
        for name in ("0.pkl", "0.json"):
            file.add(world.folder / name, name)


def _named(world: World, name: str) -> None:
    import yaml

    world.text(
        "runs/b/config.yaml",
        yaml.safe_dump({"run": {"name": name, "seed": 1}, "objective": {"name": name}}),
    )
    rows = [{"step": n, "reward/mean": 0.1, name: 0.5, "eval/x/pass@1": 0.1} for n in range(3)]
    world.text("runs/b/metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def _page(world: World, outcome: Outcome) -> None:
    assert outcome.code or "<script>alert" not in (world.folder / "page").read_text()


def _table(world: World, outcome: Outcome) -> None:
    assert outcome.code or "\\input{" not in (world.folder / "t.tex").read_text()


def _samples(world: World, rows: list[dict[str, Any]]) -> None:
    lines("runs/b/eval/samples-1.jsonl", [{"digest": "1", "judged_by": {}}, *rows])(world)


def _sharded(world: World, name: str, *, other: bool = False) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(world.model / "model.safetensors")
    (world.model / "model.safetensors").rename(world.model / "a.safetensors")
    shutil.copy(world.model / "a.safetensors", world.folder / "model.safetensors")
    if other:
        save_file({"x": np.ones(3, np.float32)}, world.model / name)
    files = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": name}
    world.text(
        "model/model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": files})
    )


def _blobs(world: World) -> None:
    (world.folder / "blobs").mkdir()
    for number, path in enumerate(sorted(world.model.iterdir())):
        path.rename(world.folder / f"blobs/{number}")
        path.symlink_to(f"../blobs/{number}")


# -------------------------------------------------------------------------------------------
# permissions, tools, services
USER = "R='setpriv --bounding-set=-dac_override,-dac_read_search'; $R true || exit 0; "
"""A root without its right to read and write everything."""
SLEEP = "#!/bin/sh\nexec sleep 300\n"
NONSENSE = "#!/bin/sh\nhead -c 3000 /dev/urandom\nprintf '\\033[2J\\n7\\n' >&2\nexit 3\n"
TOOLS = (
    "nvidia-smi",
    "bwrap",
    "squeue",
    "sacct",
    "sinfo",
    "scontrol",
    "lfs",
    "quota",
    "git",
    "hostname",
    "ip",
    "df",
)


def tools(content: str, *names: str) -> Arrange:
    return lambda w: [w.text(f"bin/{name}", content).chmod(0o755) for name in names or TOOLS]


def submitted(sbatch: str, **others: str) -> Arrange:
    return together(
        tools(f"#!/bin/sh\n{sbatch}\n", "sbatch"),
        *(tools(f"#!/bin/sh\n{body}\n", name) for name, body in others.items()),
    )


IN_BIN = "PATH={w}/bin:$PATH "
SCRIPTS: dict[str, Try] = {
    "permission: data": Try(USER + "chmod 000 {w}/train.jsonl; $R $P data preview {r}"),
    "permission: configuration": Try(USER + "chmod 000 {r}; $R $P config show {r}"),
    "permission: weights": Try(USER + "chmod 000 {m}/model.safetensors; $R $P convert to-megatron "
                                      "--hf {m} --out {w}/o"),
    "permission: a run": Try(USER + "chmod 000 {w}/runs/a; $R $P status {w}/runs/a", TWO),
    "permission: metrics of a run": Try(USER + "chmod 000 {w}/runs/a/metrics.jsonl; $R $P compare "
                                               "{w}/runs/a --out {w}/o", TWO),
    "permission: an output": Try(USER + "mkdir {w}/ro; chmod 555 {w}/ro; $R $P convert "
                                        "to-megatron --hf {m} --out {w}/ro/o"),
    "permission: a reward": Try(USER + "chmod 000 {w}/reward.py; $R $P data preview {r}"),
    "tools that hang: doctor": Try(IN_BIN + "$P doctor", tools(SLEEP), "either"),
    "tools that hang: preflight": Try(IN_BIN + "$P preflight {r}", tools(SLEEP), "either"),
    "tools of nonsense: doctor": Try(IN_BIN + "$P doctor", tools(NONSENSE), "either", no_escape),
    "tools of nonsense: preflight": Try(IN_BIN + "$P preflight {r}", tools(NONSENSE), "either", no_escape),
    "sbatch takes 25 s": Try(IN_BIN + "$P submit {r} --cluster local", submitted("sleep 25; echo 7"), "either"),
    "cancel: squeue prints nonsense": Try(IN_BIN + "$P submit {r} --cluster local; " + IN_BIN + "$P cancel {w}/runs/tiny", submitted("echo 7", squeue="head -c 3000 /dev/urandom", scancel="true"), "either", no_escape),
    "cancel: scancel fails": Try(IN_BIN + "$P submit {r} --cluster local; " + IN_BIN + "$P cancel {w}/runs/tiny", submitted("echo 7", squeue="echo 7 RUNNING tiny", scancel="echo no >&2; exit 1"), "either"),
    "logs: a run that has ended is followed": Try("timeout -s INT 25 $P logs {w}/runs/a --follow", together(TWO, text("runs/a/logs/rank0.log", "one\n"), text("runs/a/exit_code", "0\n")), "either", codes=(124, 130, 2)),
}  # fmt: skip
CASES = QUICK | SCRIPTS


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_the_world_is_odd(name: str, original: World, tmp_path: Path) -> None:
    in_copy(name, CASES[name], original, tmp_path)


@pytest.mark.full
def test_a_hub_that_drips(original: World, tmp_path: Path) -> None:
    with serving(drip) as url:
        fetch = f"HF_HUB_OFFLINE=0 HF_ENDPOINT={url[:-2]} timeout -s INT 30 $P fetch {{r}} model.path=some/model"
        in_copy(
            "fetch: a hub that drips",
            Try(fetch, end="either", codes=(124, 130)),
            original,
            tmp_path,
        )


@pytest.mark.full
def test_the_judge_rejects(original: World, tmp_path: Path) -> None:
    """A case that fails in each of the ways does fail."""
    python = f"{sys.executable} -c"
    for script, fault in (
        ("true", "accepted"),
        ("exit 3", "0 errors"),
        ("echo 'AError: x'; echo 'BError: y'; exit 1", "2 errors"),
        (f"{python} 'raise SystemExit(1/0)'", "Traceback"),
        ("echo 'AError: x'; rm {w}/train.jsonl; exit 1", "lost train.jsonl"),
        ("echo 'AError: x'; touch {w}/canary; exit 1", "a canary"),
        ("echo 'AError: x'; touch {w}/a.partial; exit 1", "half-written a.partial"),
    ):
        with pytest.raises(AssertionError, match=fault):
            in_copy("judge", Try(script), original, tmp_path)
