"""Certifies many cases in one session and appends a line of JSON for each to a log; cases in the
log are skipped.

    python -m tests.support.certify_campaign LOG planted
    python -m tests.support.certify_campaign LOG shipped rivals random --seeds 0 200

Each line: kind, case, result, what deviated first, seconds, and the largest deviation of each
quantity. The exit code is 1 if a planted error is green or a correct configuration red. SIGTERM
ends it between two cases.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.shipped import run_file
from pacs_megatron.workbench.certify.run import certify, make_case
from tests.distributed.workbench.certify.test_run import RIVALS, SHIPPED
from tests.support.policies.certify_runs import KIN_RUNS, UNSEEN, random_run, write_run
from tests.support.policies.changed_runs import CHANGED, certify_changed
from tests.support.policies.planted_more import PLANTED
from tests.support.policies.unseen_runs import COMBINATIONS

KINDS = ("planted", "shipped", "rivals", "unseen", "changed", "combinations", "random", "kin")
EXAMPLES = Path(__file__).parents[2] / "examples" / "objectives"


def cases(kinds: list[str], seeds: range) -> Iterator[tuple[str, str]]:
    names: dict[str, Iterable[str]] = {
        "planted": PLANTED,
        "shipped": SHIPPED,
        "rivals": RIVALS,
        "random": [str(seed) for seed in seeds],
        "unseen": UNSEEN,
        "changed": CHANGED,
        "combinations": COMBINATIONS,
        "kin": KIN_RUNS,
    }
    yield from ((kind, name) for kind in kinds for name in names[kind])


def run_case(kind: str, name: str, folder: Path) -> dict[str, object]:
    """One line of the log."""
    patch = pytest.MonkeyPatch()
    before = dict(os.environ)
    start = time.monotonic()
    try:
        path = folder / "run.yaml"
        overrides = []
        if kind == "planted":
            path = write_run(folder, PLANTED[name].changes, PLANTED[name].family)
            PLANTED[name].plant(patch)
        elif kind in ("random", "unseen", "kin"):
            family, changes = (
                random_run(int(name)) if kind == "random" else (UNSEEN | KIN_RUNS)[name]
            )
            path = write_run(folder, changes, family)
            make_case(load_config(path), None)
        elif kind == "shipped":
            path = run_file(name)
        elif kind == "rivals":
            path = EXAMPLES / f"{name}.yaml"
            overrides = RIVALS[name]
        if kind in ("changed", "combinations"):
            certificate = certify_changed(folder, (CHANGED | COMBINATIONS)[name])
        else:
            found = certify(path, overrides, out=folder / "certificate")
            assert found is not None
            certificate = found
    except ConfigError as error:
        return {"kind": kind, "case": name, "result": "not legal", "first_deviation": str(error)}
    finally:
        patch.undo()
        os.environ.clear()
        os.environ.update(before)
    content = certificate.content
    largest = {quantity["name"]: quantity["largest"] for quantity in content["quantities"]}
    return {
        "kind": kind,
        "case": name,
        "result": content["result"],
        "first_deviation": content["first_deviation"],
        "seconds": round(time.monotonic() - start, 1),
        "largest": {
            name: float(f"{v:.3g}") if isinstance(v, float) else v for name, v in largest.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("log", type=Path)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 26))
    options = parser.parse_args()
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))
    lines = options.log.read_text().splitlines() if options.log.exists() else []
    done = {(line["kind"], line["case"]): line for line in map(json.loads, lines)}
    for kind, name in cases(options.kinds, range(*options.seeds)):
        if (kind, name) not in done and not stops:
            with tempfile.TemporaryDirectory() as folder:
                line = done[kind, name] = run_case(kind, name, Path(folder))
            with options.log.open("a") as log:
                log.write(json.dumps(line) + "\n")
            print(f"{line['result']:10} {kind} {name}: {line['first_deviation']}", flush=True)
    wrong = [
        key
        for key, line in done.items()
        if line["result"] == ("green" if key[0] == "planted" else "red")
    ]
    print(f"{len(done)} cases, {len(wrong)} of them wrong: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
