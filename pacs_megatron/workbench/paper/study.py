"""`paper`: train -> evaluate -> diversity -> tables and figures of arXiv:2509.02522, on this host
or through Slurm.

`configs/paper/studies/` lists methods, artefacts and published numbers. A node is done when its
output is complete. A call runs the missing nodes; for a finished study it only prints the tables.
Interrupted runs and evaluations resume.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pacs_megatron.checkpoint.names import newest_step
from pacs_megatron.config import load_config
from pacs_megatron.config.cluster import load_cluster
from pacs_megatron.config.yaml_tree import parse_yaml
from pacs_megatron.errors import ConfigError, ExitCode, PacsError
from pacs_megatron.launch.job import job_states, known_jobs
from pacs_megatron.runtime.files import write_atomically
from pacs_megatron.runtime.json_reader import parsing, read_object
from pacs_megatron.runtime.processes import die_with_parent
from pacs_megatron.runtime.run_folder import EXIT_CODE_FILE, read_exit_code
from pacs_megatron.runtime.run_lock import RunLock
from pacs_megatron.runtime.shipped import shipped_folder

PRODUCT = ("-m", "pacs_megatron")
VECTORS = "diversity.npz"
_MAX_SEEDS = 256
_SET = ("model", "model.path", "run", "run.dir", "run.name", "run.seed")


@dataclass(frozen=True, slots=True)
class Node:
    """A command of this interpreter and its output."""

    label: str
    words: tuple[str, ...]
    is_done: Callable[[], bool]
    cwd: Path | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """The nodes of one run, or of the untrained model, in their order."""

    folder: Path
    config: Path
    overrides: tuple[str, ...]
    nodes: tuple[Node, ...]


class Study:
    """A file of `configs/paper/studies/` and its folder of runs.

    Raises ConfigError without a required checkout.
    """

    def __init__(self, scale: str, base: Path, overrides: Sequence[str], seeds: int | None) -> None:
        self.scale = scale
        self.base = base
        self.overrides = tuple(overrides)
        for word in overrides:
            if word.partition("=")[0].strip() in _SET:
                raise ConfigError(
                    f"{word}: a study sets this key or a part of it for every run; remove it"
                )
        if not str(base).isprintable() or any(
            part in f"{base} " for part in ('"', "\\", ": ", " #", "  ")
        ):
            raise ConfigError(
                f"--dir {base}: YAML reads {chr(34)}, \\, `: `, ` #` or two spaces otherwise; "
                "rename it"
            )
        self._configs = shipped_folder("configs").resolve()
        self.file = self._configs / "paper" / "studies" / f"{scale}.yaml"
        with parsing(str(self.file), ConfigError):
            text = self.file.read_text(encoding="utf-8").replace("{dir}", str(base))
            spec: Any = parse_yaml(text, f"{scale}.yaml").plain()
            self.spec: dict[str, Any] = spec
            self.seeds: int = seeds or self.spec["seeds"]
            if self.seeds > _MAX_SEEDS:
                raise ConfigError(f"--seeds {self.seeds}, expected at most {_MAX_SEEDS}")
            self.evaluation_of = {
                benchmark.name: name
                for name, entry in self.spec["evaluations"].items()
                for benchmark in load_config(*self._file(entry)).config.evaluation.benchmarks
            }
            for methods in self.spec.get("published", {}).values():
                for row in (row for rows in methods.values() for row in rows.values()):
                    assert len(row) in (1, len(self.spec["k"])) and sum(row) > 0, (
                        f"published: {row}"
                    )
        if "prepare" in self.spec and not (self._configs.parent / "examples").is_dir():
            raise ConfigError(
                f"--scale {scale} needs examples/quickstart/ of a checkout; run it there"
            )

    def artefacts(self, names: Sequence[str]) -> dict[str, Any]:
        """Name -> its entry. Raises ConfigError for an unknown name."""
        known = self.spec["artefacts"]
        if not names:
            raise ConfigError(
                f"no table or figure is named; choose from {', '.join(known)}, or all"
            )
        for name in set(names) - {*known, "all"}:
            raise ConfigError(
                f"{name}: unknown at scale {self.scale}; choose from {', '.join(known)}, or all"
            )
        return {name: entry for name, entry in known.items() if name in names or "all" in names}

    def runs(self, model: str, method: str) -> list[Path]:
        """The folders of a method, one per seed; the untrained model has one folder."""
        names = (
            ["base"] if method == "base" else [f"{method}-s{seed}" for seed in range(self.seeds)]
        )
        return [self.base / f"{model}-{name}" for name in names]

    def _file(
        self, words: Sequence[str], model: str = "", common: Sequence[str] = ()
    ) -> tuple[Path, tuple[str, ...]]:
        """(file, overrides) of an entry of the study."""
        return (self._configs / words[0].replace("{model}", model)).resolve(), (*words[1:], *common)

    def nodes(self, entries: Sequence[Any]) -> tuple[list[Node], list[Chain]]:
        """(nodes before all runs, a chain with evaluations for each run that these artefacts need).

        Raises ConfigError.
        """
        first = [
            Node(name, tuple(entry["python"]), Path(entry["done"]).exists, self._configs.parent)
            for name, entry in self.spec.get("prepare", {}).items()
        ]
        needs: dict[tuple[str, str], set[str]] = {}
        for entry in entries:
            wanted = {
                self.evaluation_of[name] for name in entry.get("benchmarks", self.spec["diversity"])
            }
            wanted |= {"diversity"} if entry.get("kind") in ("diversity", "exploration") else set()
            for model in entry["models"]:
                for method in entry["methods"]:
                    needs.setdefault((model, method), set()).update(wanted)
        return first, [
            self._chain(model, method, wanted, seed, folder)
            for (model, method), wanted in needs.items()
            for seed, folder in enumerate(self.runs(model, method))
        ]

    def _chain(self, model: str, method: str, wanted: set[str], seed: int, folder: Path) -> Chain:
        entry = self.spec["models"][model]
        nodes = []
        place = (
            f"model.path={entry['base']}",
            f"run.dir={self.base}",
            f"run.name={folder.name}",
            f"run.seed={seed}",
        )
        common = (*entry.get("overrides", ()), *place, *self.overrides)
        is_base = method == "base"
        words = self.spec["evaluations"]["eval"] if is_base else self.spec["methods"][method]
        config, overrides = self._file(words, model, common)
        files = [(config, overrides)]
        if not is_base:
            is_done = partial(_is_trained, config, overrides, folder)
            nodes.append(Node("train", (*PRODUCT, "train", str(config), *overrides), is_done))
        for name in [name for name in self.spec["evaluations"] if name in wanted]:
            files.append(self._file(self.spec["evaluations"][name], common=common))
            source = (
                "--model",
                entry["base"] if is_base else str(folder),
                "--out",
                str(folder / name),
            )
            words = (*PRODUCT, "eval", str(files[-1][0]), *files[-1][1], *source)
            nodes.append(Node(name, words, (folder / name / "results.json").is_file))
        if "diversity" in wanted:
            words = (*PRODUCT, "diversity", str(folder), "--embedder", self.spec["embedder"])
            words += (
                "--benchmark",
                *self.spec["diversity"],
                "--out",
                str(folder / "diversity.html"),
            )
            nodes.append(
                Node(
                    "diversity",
                    (*words, "--save", str(folder / VECTORS)),
                    (folder / VECTORS).is_file,
                )
            )
        for file, changes in (
            files if seed == 0 else ()
        ):  # before the first run starts; other seeds load too
            load_config(file, changes)
        return Chain(folder, config, overrides, tuple(nodes))


def _is_trained(config: Path, overrides: Sequence[str], folder: Path) -> bool:
    """Whether the last attempt ended with exit code 0 at run.steps, with an export."""
    code = folder / EXIT_CODE_FILE
    ended_well = code.is_file() and read_exit_code(code, ExitCode.FAILED) == ExitCode.OK
    steps = load_config(config, overrides).config.run.steps
    return ended_well and (folder / "hf").is_dir() and newest_step(folder) == steps


def run_study(
    study: Study, names: Sequence[str], *, cluster: Path | None, dry_run: bool
) -> Iterator[str]:
    """Runs or submits the missing nodes of the artefacts; yields progress lines, then tables and
    paths of figures.

    Raises ConfigError for a folder of another study, and PacsError with the exit code of a node
    that failed.
    """
    with parsing(str(study.file), ConfigError):
        found = study.artefacts(names)
        first, chains = study.nodes(list(found.values()))
    if not next(
        path for path in (study.base, *study.base.parents) if os.path.lexists(path)
    ).is_dir():
        raise ConfigError(f"{study.base} is not a folder, or below a file; choose another --dir")
    if cluster is not None:
        load_cluster(cluster)
    if dry_run:
        for name, node in [("first", n) for n in first] + [
            (c.folder.name, n) for c in chains for n in c.nodes
        ]:
            yield f"{name} {node.label}: {'done' if node.is_done() else 'missing'}  python {' '.join(node.words)}"
        return
    with RunLock(study.base, "paper"):
        mine = {"scale": study.scale, "overrides": list(study.overrides)}
        path = study.base / "study.json"
        if path.is_file() and read_object(path) != mine:
            raise ConfigError(
                f"{study.base} has a study with {read_object(path)}, got {mine}; choose another "
                "--dir"
            )
        write_atomically(path, [json.dumps(mine).encode() + b"\n"])
        for node in first:
            yield from _run("first", node)
        missing = [chain for chain in chains if not all(node.is_done() for node in chain.nodes)]
        for chain in missing:
            queued = ", ".join(job_states(list(known_jobs(chain.folder))))
            if queued and cluster is None:
                raise ConfigError(
                    f"{chain.folder}: in the queue: {queued}; wait for these jobs, or pass "
                    "--cluster"
                )
            if cluster is not None:
                yield from (
                    [f"{chain.folder.name}: in the queue: {queued}"]
                    if queued
                    else _submit(chain, cluster)
                )
        if cluster is not None and missing:
            yield "the same command prints the tables when these jobs have ended"
            return
        for number, chain in enumerate(chains, start=1):
            for node in chain.nodes:
                yield from _run(f"{number}/{len(chains)} {chain.folder.name}", node)
        for name, entry in found.items():
            yield from _artefact(study, name, entry)


def _run(name: str, node: Node) -> Iterator[str]:
    """Runs a node, unless it is done; yields lines to print."""
    if node.is_done():
        return
    yield f"{name}: {node.label}"
    # If `paper` is killed, the run gets SIGTERM, saves and stops.
    process = subprocess.Popen(
        [sys.executable, *node.words],
        cwd=node.cwd,
        stdout=sys.stderr,
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal also sends it to the run, which saves and stops
        process.wait()
        raise
    if code or not node.is_done():
        error = PacsError(
            f"{name}: {node.label} ended with exit code {code}; the same command continues there"
        )
        error.exit_code = ExitCode(code) if code and code in set(ExitCode) else ExitCode.FAILED
        raise error


def _submit(chain: Chain, cluster: Path) -> Iterator[str]:
    """Submits the missing nodes of a chain as jobs that depend on each other."""
    from pacs_megatron.launch.batch_script import Request
    from pacs_megatron.launch.submit import submit

    missing = [node for node in chain.nodes if not node.is_done()]
    if not missing:  # its last job ended meanwhile
        return
    later = tuple(
        (node.label, node.words[len(PRODUCT) :]) for node in missing if node.label != "train"
    )
    request = Request(
        config=chain.config, overrides=chain.overrides, cluster=load_cluster(cluster), later=later,
        train=missing[0].label == "train",
    )  # fmt: skip
    yield from submit(request, dry_run=False)


# ----------------------------------------------------------------------------------------------------
# tables and figures
def _artefact(study: Study, name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Writes <name>.json and <name>.txt, and the pages of a figure; yields the table and the paths
    of the pages.
    """
    from pacs_megatron.workbench.compare.compare import compare
    from pacs_megatron.workbench.compare.page import compare_html
    from pacs_megatron.workbench.diversity import diversity_page, load_vectors
    from pacs_megatron.workbench.paper.tables import Cell, diversity_cells, pass_cells, table_text

    spec = study.spec
    kind = entry.get("kind")
    unit = "pass@k in %"
    cells: list[Cell] = []
    pages: dict[Path, str] = {}
    for model in entry["models"]:
        runs = {method: study.runs(model, method) for method in entry["methods"]}
        every = [run for found in runs.values() for run in found]
        if kind in ("curves", "exploration"):
            pages[study.base / f"{name}-{model}.html"] = compare_html(compare(every))
        if kind in ("diversity", "exploration"):
            embedder, vectors = load_vectors([run / VECTORS for run in every])
            unit = f"mean cosine distance of correct responses; embedder: {embedder}"
            if kind == "exploration":
                pages[study.base / f"{name}-{model}-pca.html"] = diversity_page(embedder, vectors)[
                    1
                ]
            known = spec.get("published_diversity", {}).get(model, {})
            for benchmark in spec["diversity"]:
                cells += diversity_cells((model, benchmark), runs, vectors, known)
        for benchmark in entry.get("benchmarks", ()):
            known = {m: dict(zip(spec["k"], v.get(benchmark, ()), strict=False))
                     for m, v in spec.get("published", {}).get(model, {}).items()}  # fmt: skip
            evaluations = {
                m: [run / study.evaluation_of[benchmark] for run in found]
                for m, found in runs.items()
            }
            cells += pass_cells((model, benchmark), entry.get("k", spec["k"]), evaluations, known)
    beside = "published" if "published" in spec else "nothing published for this model and task"
    text = f"{name}: {unit}. Ours [95 % bootstrap over seeds and problems] / {beside}\n\n{table_text(cells)}"
    write_atomically(
        study.base / f"{name}.json",
        [json.dumps([asdict(c) for c in cells], indent=1).encode(), b"\n"],
    )
    write_atomically(study.base / f"{name}.txt", [text.encode(), b"\n"])
    yield f"\n{text}"
    for path, page in pages.items():
        write_atomically(path, [page.encode()])
        yield str(path)
