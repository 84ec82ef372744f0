"""The third part of the ninth set: runs whose folder, state or samples another hand changed.

Written before a case of it ran.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save_file

from tests.integration.test_hostile_files import link, text, together
from tests.integration.test_hostile_life import STEP, Trained
from tests.integration.test_hostile_ninth import USER, Try, judge
from tests.integration.test_hostile_ninth_runs import EVAL, SLOW, TRAIN, if_works, rows, whole_rows
from tests.integration.test_hostile_verbs import TWO
from tests.support.hostile import Arrange, Outcome, World, run

AGAIN = TRAIN + "run.steps=3 "
RUN = "runs/tiny"
AHEAD = "runs/ahead/checkpoints/step_000001"
THREE = rows(1, 2, 3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run `tiny` of two steps, and a run `ahead` whose newest checkpoint has samples of a later
    step.
    """
    found = Trained(tmp_path_factory.mktemp("trained"))
    words = ("parallel.tp=1", "run.name=ahead", "rollout.max_staleness=1")
    ended = run(["train", found.world.run, *words], found.world.folder, {})
    assert ended.code == 0, ended.text
    shutil.copytree(found.world.folder / "runs/ahead", found.copy / "runs/ahead", symlinks=True)
    shutil.rmtree(found.copy / "runs/ahead/checkpoints/step_000002")
    return found


def fitted(folder: str, name: str) -> Arrange:
    """The manifest of a checkpoint with the digest that a file has now."""

    def fit(world: World) -> None:
        path = world.folder / folder / "manifest.json"
        tree = json.loads(path.read_text())
        data = (world.folder / folder / name).read_bytes()
        tree["files"][name] = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
        path.write_text(json.dumps(tree))

    return fit


def forged(folder: str, name: str, change: Callable[[dict[str, Any]], object]) -> Arrange:
    def forge(world: World) -> None:
        path = world.folder / folder / name
        if name.endswith(".json"):
            tree = json.loads(path.read_text())
            change(tree)
            path.write_text(json.dumps(tree))
        else:
            tensors = {key: value.copy() for key, value in load_file(path).items()}
            change(tensors)
            save_file(tensors, path)
        fitted(folder, name)(world)

    return forge


def state(**changes: Any) -> Arrange:
    return forged(STEP, "state.json", lambda tree: tree.update(changes))


def driver(**changes: Any) -> Arrange:
    return forged(STEP, "state.json", lambda tree: tree["driver"].update(changes))


def _swapped_tokens(world: World) -> None:
    path = world.model / "tokenizer.json"
    tree = json.loads(path.read_text())
    vocabulary = tree["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    path.write_text(json.dumps(tree))


def _elsewhere(world: World) -> None:
    shutil.move(world.folder / STEP, world.folder / "runs/big_disk")
    (world.folder / STEP).symlink_to(world.folder / "runs/big_disk")


def _kept(name: str, content: str = "years of work") -> Callable[[World, Outcome], object]:
    def kept(world: World, outcome: Outcome) -> None:
        assert (world.folder / name).is_file(), f"{name} is lost"
        assert (world.folder / name).read_text() == content

    return kept


def _says(*words: str) -> Callable[[World, Outcome], object]:
    def says(world: World, outcome: Outcome) -> None:
        assert any(word in outcome.text for word in words), outcome.text[-500:]

    return says


def _distcp(world: World) -> None:
    path = world.folder / STEP / "dist/__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(bytes(data))
    fitted(STEP, "dist/__0_0.distcp")(world)


def _common(world: World) -> None:
    (world.folder / STEP / "dist/common.pt").write_bytes(b"PK\x03\x04" + bytes(99))
    fitted(STEP, "dist/common.pt")(world)


def _step_of_another(world: World) -> None:
    shutil.rmtree(world.folder / STEP)
    shutil.copytree(world.folder / RUN / "checkpoints/step_000001", world.folder / STEP)
    path = world.folder / STEP / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step": 2}))


def sampled(change: Callable[[Path], object]) -> Arrange:
    """Samples of an evaluation, changed."""

    def arrange(world: World) -> None:
        words = EVAL.replace("{r}", str(world.run)).replace("{w}", str(world.folder))
        ended = run(["sh", "-c", f"{words} --out {world.folder}/e"], world.folder, {})
        assert ended.code == 0, ended.text
        change(next((world.folder / "e").glob("samples*.jsonl")))
        shutil.copytree(world.folder / "e", world.folder / "runs/e")
        shutil.rmtree(world.folder / "e")

    return arrange


BUFFER = TRAIN + "run.name=ahead rollout.max_staleness=1 run.steps=2"
AGAIN_EVAL = EVAL + "--out {w}/runs/e"
CASES: dict[str, Try] = {
    # ------------------------------------------------------------------------------------------------
    # folders in each other
    "a run in the folder of checkpoints": Try(TRAIN + "run.dir={w}/runs/tiny run.name=checkpoints"),
    "a run in the folder of an export": Try(TRAIN + "run.dir={w}/runs/tiny run.name=hf"),
    "notes beside the exported model": Try(AGAIN, text(RUN + "/hf/notes.txt", "years of work"), "either", _kept(RUN + "/hf/notes.txt")),
    "notes among the checkpoints": Try(AGAIN, text(RUN + "/checkpoints/notes.txt", "years of work"), "either", _kept(RUN + "/checkpoints/notes.txt")),
    "a checkpoint behind a link, one is kept": Try(TRAIN + "run.steps=4 checkpoint.keep_last=1", _elsewhere, "works", rows(1, 2, 3, 4)),
    "a later checkpoint that is a link to the newest": Try(AGAIN, link(RUN + "/checkpoints/step_000003", "step_000002"), "either", if_works(THREE)),
    "a run behind a link": Try("mv {w}/runs/tiny {w}/runs/far; ln -s far {w}/runs/tiny; " + AGAIN, TWO, "works", THREE),
    "a run that moved": Try("mv {w}/runs/tiny {w}/runs/moved; " + AGAIN + "run.name=moved", TWO, "works", rows(1, 2, 3, name="runs/moved")),
    "a lock that is a link to data": Try(AGAIN, together(text("data.jsonl", "mine"), link(RUN + "/run.lock", "{w}/data.jsonl")), "either"),
    "a configuration that is a link to the user's": Try(AGAIN, link(RUN + "/config.yaml", "{w}/tiny.yaml"), "either"),
    "a log that is a link to data": Try(AGAIN, together(text("data.jsonl", "mine"), link(RUN + "/logs/driver.log", "{w}/data.jsonl"), link(RUN + "/exit_code", "{w}/train.jsonl")), "either"),
    "a configuration of nonsense in the run": Try(AGAIN, text(RUN + "/config.yaml", "run: {seed: [\n\x00"), "either", if_works(THREE)),
    "a run without permission": Try(USER + "chmod -R a-w {w}/runs/tiny; $R " + AGAIN, TWO),
    "the same command on a run that has ended": Try(TRAIN, TWO, "works", rows(1, 2)),
    # --------------------------------------------------------------------------------------------------
    # inputs that changed
    "two tokens have changed places": Try(AGAIN, _swapped_tokens, "either", _says("tokenizer")),
    "as many other problems": Try(AGAIN, text("train.jsonl", "".join(json.dumps({"problem": f"{n} - 1 = ?", "answer": "1"}) + "\n" for n in range(16))), "either", _says("train.jsonl", "data set", "problems")),
    "another order of the data": Try(AGAIN + "data.shuffle=false", TWO),
    # ---------------------------------------------------------------------------------------------------------
    # forged state
    "a version of -1": Try(AGAIN, state(policy_version=-1)),
    "a digest of text": Try(AGAIN, state(digest=["x"]), "works", THREE),
    "an optimizer of format 99": Try(AGAIN, state(optimizer_format=99)),
    "a reference that is not there": Try(AGAIN, state(has_reference=True), "either", if_works(THREE)),
    "a position of 1e9 in the data": Try(AGAIN, driver(position=10**9), "either", if_works(THREE)),
    "an epoch of 2**70": Try(AGAIN, driver(epoch=2**70), "either", if_works(THREE)),
    "skipped prompts of lists": Try(AGAIN, driver(skipped=[["x"], 7])),
    "weights with a fitting manifest": Try(AGAIN, _distcp, "either", if_works(THREE)),
    "a common part of nonsense": Try(AGAIN, _common),
    "the first step as the second": Try(AGAIN, _step_of_another),
    # --------------------------------------------------------------------------------------------------------
    # forged samples
    "a token beyond the vocabulary": Try(BUFFER, forged(AHEAD, "buffer.safetensors", lambda t: t["token_ids"].__setitem__(3, 2**30))),
    "a negative token": Try(BUFFER, forged(AHEAD, "buffer.safetensors", lambda t: t["token_ids"].__setitem__(slice(None), -5))),
    "offsets that go back": Try(BUFFER, forged(AHEAD, "buffer.safetensors", lambda t: t["offsets"].__setitem__(1, 10**12))),
    "log-probs of nan": Try(BUFFER, forged(AHEAD, "buffer.safetensors", lambda t: t["logprobs"].__setitem__(slice(None), np.nan)), "either"),
    "labels of 7": Try(BUFFER, forged(AHEAD, "buffer.safetensors", lambda t: t["labels"].__setitem__(slice(None), 7))),
    "samples of unknown prompts": Try(BUFFER, forged(AHEAD, "buffer.json", lambda t: t.update(prompt_ids=["x/1"] * 16))),
    "samples of step 99": Try(BUFFER, forged(AHEAD, "buffer.json", lambda t: t["steps"][0].update(step=99))),
    # ------------------------------------------------------------------------------------------------------------
    # evaluation
    "an evaluation whose last line is cut": Try(AGAIN_EVAL, sampled(lambda p: os.truncate(p, p.stat().st_size - 30)), "works"),
    "an evaluation with line ends of Windows": Try(AGAIN_EVAL, sampled(lambda p: p.write_bytes(p.read_bytes().replace(b"\n", b"\r\n"))), "either"),
    "two evaluations of two seeds in one folder": Try(EVAL + "--out {w}/x > {w}/first 2>&1 & " + EVAL + "run.seed=7 --out {w}/x; a=$?; wait $!; b=$?; test $(($a * $b)) = 0 && exit 7", TWO, "either", None, (7,)),
    "two exports of one step": Try("$P export {w}/runs/tiny --step 1 > {w}/first 2>&1 & $P export "
                                   "{w}/runs/tiny --step 1; a=$?; wait $!; b=$?; test -s "
                                   "{w}/runs/tiny/hf_exports/step_000001/config.json -a $(($a * "
                                   "$b)) = 0 && exit 7", TWO, "either", None, (7,)),
    "an export of a step that goes": Try(TRAIN + "run.steps=12 checkpoint.keep_last=1 > {w}/first "
                                                 "2>&1 & for n in 1 2 3; do sleep 5; $P export "
                                                 "{w}/runs/tiny --out {w}/x$n || break; done; "
                                                 "a=$?; wait $! || exit 1; exit $a", SLOW, "either", whole_rows),
    "a second writer through a link": Try("ln -s runs {w}/way; " + TRAIN + "run.steps=9 > "
                                                                           "{w}/first 2>&1 & "
                                                                           "sleep 12; " + TRAIN + "run.steps=3 run.dir={w}/way; a=$?; wait $! || exit 9; exit $a", SLOW, "error", whole_rows),
}  # fmt: skip


@pytest.mark.campaign
@pytest.mark.parametrize("name", CASES)
def test_states(name: str, trained: Trained) -> None:
    judge(name, CASES[name], trained.restore())
