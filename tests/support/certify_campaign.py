"""Certifies many cases in one session and appends a line of JSON for each to a log; cases in the
log are skipped.

    python -m tests.support.certify_campaign LOG injected
    python -m tests.support.certify_campaign LOG shipped examples random --seeds 0 200

Each line: kind, case, result, what deviated first, seconds, and the largest deviation of each
quantity. The exit code is 1 if the first deviation of an injected error is not a number, or a
correct configuration is red. SIGTERM ends it between two cases.
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
from typing import Any

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.shipped import run_file
from pacs_megatron.workbench.certify.certificate import Certificate
from pacs_megatron.workbench.certify.run import certify, make_case
from tests.support.policies.certify_runs import (
    EXAMPLE_FOLDER,
    EXAMPLES,
    OBJECTIVE_RUNS,
    SHIPPED,
    UNSEEN,
    UPSTREAM,
    random_run,
    write_run,
)
from tests.support.policies.changed_runs import CHANGED, certify_changed
from tests.support.policies.hybrid_runs import HYBRID_RUNS
from tests.support.policies.injected_errors import INJECTED_ERRORS, is_number
from tests.support.policies.unseen_runs import COMBINATIONS

KINDS = (
    "injected",
    "shipped",
    "examples",
    "unseen",
    "changed",
    "combinations",
    "random",
    "objectives",
    "upstream",
    "hybrids",
)
Key = tuple[str, str]
"""(kind, case)"""


def cases(kinds: list[str], seeds: range) -> Iterator[Key]:
    names: dict[str, Iterable[str]] = {
        "injected": INJECTED_ERRORS,
        "shipped": SHIPPED,
        "examples": EXAMPLES,
        "random": [str(seed) for seed in seeds],
        "unseen": UNSEEN,
        "changed": CHANGED,
        "combinations": COMBINATIONS,
        "objectives": OBJECTIVE_RUNS,
        "upstream": UPSTREAM,
        "hybrids": HYBRID_RUNS,
    }
    for kind in kinds:
        for name in names[kind]:
            yield kind, name


def run_case(kind: str, name: str, folder: Path) -> dict[str, Any]:
    """One line of the log."""
    patch = pytest.MonkeyPatch()
    before = dict(os.environ)
    start = time.monotonic()
    try:
        certificate = certify_case(kind, name, folder, patch)
    except ConfigError as error:
        return {"kind": kind, "case": name, "result": "not legal", "first_deviation": str(error)}
    finally:
        patch.undo()
        os.environ.clear()
        os.environ.update(before)

    content = certificate.content
    return {
        "kind": kind,
        "case": name,
        "result": content["result"],
        "first_deviation": content["first_deviation"],
        "seconds": round(time.monotonic() - start, 1),
        "largest": {
            quantity["name"]: three_digits(quantity["largest"])
            for quantity in content["quantities"]
        },
    }


def certify_case(kind: str, name: str, folder: Path, patch: pytest.MonkeyPatch) -> Certificate:
    overrides: list[str] = []
    match kind:
        case "changed" | "combinations":
            return certify_changed(folder, (CHANGED | COMBINATIONS)[name])
        case "injected":
            error = INJECTED_ERRORS[name]
            path = write_run(folder, error.changes, error.family)
            error.inject(patch)
        case "shipped":
            path = run_file(name)
        case "examples":
            path = EXAMPLE_FOLDER / f"{name}.yaml"
            overrides = EXAMPLES[name]
        case _:
            family, changes = drawn_run(kind, name)
            path = write_run(folder, changes, family)
            make_case(load_config(path), None)

    certificate = certify(path, overrides, out=folder / "certificate")
    assert certificate is not None
    return certificate


def drawn_run(kind: str, name: str) -> tuple[str, dict[str, Any]]:
    """(model of CASES, changes)"""
    if kind == "random":
        return random_run(int(name))
    return (UNSEEN | OBJECTIVE_RUNS | UPSTREAM | HYBRID_RUNS)[name]


def three_digits(largest: float | str) -> float | str:
    return float(f"{largest:.3g}") if isinstance(largest, float) else largest


def is_wrong(kind: str, line: dict[str, Any]) -> bool:
    if kind == "injected":
        return not is_number(line["first_deviation"])
    return bool(line["result"] == "red")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("log", type=Path)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 26))
    options = parser.parse_args()
    stops: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))

    done: dict[Key, dict[str, Any]] = {}
    lines = options.log.read_text().splitlines() if options.log.exists() else []
    for text in lines:
        line = json.loads(text)
        done[line["kind"], line["case"]] = line

    for kind, name in cases(options.kinds, range(*options.seeds)):
        if (kind, name) in done or stops:
            continue
        with tempfile.TemporaryDirectory() as folder:
            line = run_case(kind, name, Path(folder))
        done[kind, name] = line
        with options.log.open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(f"{line['result']:10} {kind} {name}: {line['first_deviation']}", flush=True)

    wrong = [key for key, line in done.items() if is_wrong(key[0], line)]
    print(f"{len(done)} cases, {len(wrong)} of them wrong: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
