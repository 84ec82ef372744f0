"""`paper`: train -> evaluate -> diversity -> tables and figures of arXiv:2509.02522, here or through Slurm.

`configs/paper/studies/` lists methods, artefacts and published numbers. A node is done when its own output is whole: a
call runs what is missing, and a call of a finished study only prints its tables. Runs and evaluations resume by themselves.
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
from pacs_megatron.config.yaml_tree import read_yaml
from pacs_megatron.errors import ConfigError, ExitCode, PacsError
from pacs_megatron.runtime.files import write_atomically
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.processes import die_with_parent
from pacs_megatron.runtime.run_folder import EXIT_CODE_FILE, read_exit_code
from pacs_megatron.runtime.run_lock import RunLock
from pacs_megatron.runtime.shipped import shipped_folder

PRODUCT = ("-m", "pacs_megatron")
STUDY_FILE = "study.json"
VECTORS = "diversity.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A command of this interpreter and its output."""

    label: str
    words: tuple[str, ...]
    is_done: Callable[[], bool]
    cwd: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The nodes of one run, or of the untrained model, in their order."""

    name: str
    config: Path
    overrides: tuple[str, ...]
    nodes: tuple[Node, ...]


class Study:
    """A file of `configs/paper/studies/` with its folder of runs.

    Raises ConfigError for a scale that needs a checkout.
    """

    def __init__(
        self, scale: str, base: Path, overrides: tuple[str, ...], seeds: int | None, methods: Sequence[str] | None
    ) -> None:
        self.scale, self.base, self.overrides, self.methods = scale, base, overrides, methods
        self._configs = shipped_folder("configs").resolve()
        path = self._configs / "paper" / "studies" / f"{scale}.yaml"
        self.spec: dict[str, Any] = _filled(read_yaml(path, str(path)).plain(), {"dir": str(base)})
        self.seeds: int = seeds or self.spec["seeds"]
        self.evaluation_of: dict[str | None, str] = {
            benchmark.name: name
            for name, entry in self.spec["evaluations"].items()
            for benchmark in load_config(*self._file(entry)).config.evaluation.benchmarks
        }
        if "prepare" in self.spec and not (self._configs.parent / "examples").is_dir():
            raise ConfigError(f"--scale {scale} needs examples/quickstart/ of a checkout; run it there")
        unknown = set(methods or ()) - set(self.spec["methods"])
        if unknown:
            known = ", ".join(self.spec["methods"])
            raise ConfigError(f"--methods {min(unknown)}: unknown at scale {scale}; choose from {known}")

    def artefacts(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Name -> its entry. Raises ConfigError for an unknown name."""
        known: dict[str, dict[str, Any]] = self.spec["artefacts"]
        for name in names:
            if name not in (*known, "all"):
                raise ConfigError(f"{name}: unknown at scale {self.scale}; choose from {', '.join(known)}, or all")
        return {name: entry for name, entry in known.items() if name in names or "all" in names}

    def methods_of(self, entry: Mapping[str, Any]) -> list[str]:
        """The methods of an artefact, without those that --methods leaves out."""
        return [m for m in entry["methods"] if self.methods is None or m in ("base", *self.methods)]

    def runs(self, model: str, method: str) -> list[Path]:
        """The folders of a method, one a seed; the untrained model has one."""
        if method == "base":
            return [self.base / f"{model}-base"]
        return [self.base / f"{model}-{method}-s{seed}" for seed in range(self.seeds)]

    def _file(self, words: Sequence[str], model: str = "") -> tuple[Path, tuple[str, ...]]:
        """(file, overrides) of an entry of the study."""
        return (self._configs / words[0].replace("{model}", model)).resolve(), tuple(words[1:])

    def prepare(self) -> Iterator[Node]:
        """Nodes before all runs; they run here."""
        for name, entry in self.spec.get("prepare", {}).items():
            if isinstance(entry, dict):
                done = Path(entry["done"])
                yield Node(label=name, words=tuple(entry["python"]), is_done=done.is_file, cwd=self._configs.parent)
            else:
                config, overrides = self._file(entry)
                yield self._train(config, (*overrides, *self._place(name, 0)), name)

    def _place(self, name: str, seed: int) -> tuple[str, ...]:
        return (f"run.dir={self.base}", f"run.name={name}", f"run.seed={seed}")

    def _train(self, config: Path, overrides: tuple[str, ...], name: str) -> Node:
        words = (*PRODUCT, "train", str(config), *overrides)
        return Node(label="train", words=words, is_done=partial(_is_trained, config, overrides, self.base / name))

    def chains(self, entries: Sequence[Mapping[str, Any]]) -> Iterator[Chain]:
        """The runs that these artefacts need, each once, with all evaluations that any of them needs."""
        needs: dict[tuple[str, str], set[str]] = {}
        for entry in entries:
            wanted = {self.evaluation_of[name] for name in entry.get("benchmarks", self.spec["diversity"])}
            if entry.get("kind") in ("diversity", "exploration"):
                wanted.add("diversity")
            for model in entry["models"]:
                for method in self.methods_of(entry):
                    needs.setdefault((model, method), set()).update(wanted)
        for (model, method), wanted in needs.items():
            for seed, folder in enumerate(self.runs(model, method)):
                yield self._chain(model, method, wanted, seed, folder)

    def _chain(self, model: str, method: str, wanted: set[str], seed: int, folder: Path) -> Chain:
        entry = self.spec["models"][model]
        common = (
            *entry.get("overrides", ()),
            f"model.path={entry['base']}",
            *self._place(folder.name, seed),
            *self.overrides,
        )
        source, nodes = entry["base"], []
        config, overrides = self._file(self.spec["evaluations"]["eval"])
        if method != "base":
            source = str(folder)
            config, overrides = self._file(self.spec["methods"][method], model)
            nodes.append(self._train(config, (*overrides, *common), folder.name))
        for name in [name for name in self.spec["evaluations"] if name in wanted]:
            file, options = self._file(self.spec["evaluations"][name])
            words = ("eval", str(file), *options, *common, "--model", source, "--out", str(folder / name))
            is_done = (folder / name / "results.json").is_file
            nodes.append(Node(label=name, words=(*PRODUCT, *words), is_done=is_done))
        if "diversity" in wanted:
            names = ("--embedder", self.spec["embedder"], "--benchmark", *self.spec["diversity"])
            out = ("--out", str(folder / "diversity.html"), "--save", str(folder / VECTORS))
            words = (*PRODUCT, "diversity", str(folder), *names, *out)
            nodes.append(Node(label="diversity", words=words, is_done=(folder / VECTORS).is_file))
        return Chain(name=folder.name, config=config, overrides=(*overrides, *common), nodes=tuple(nodes))


def _filled(tree: Any, values: Mapping[str, str]) -> Any:
    """`tree` with {name} replaced in every text."""
    if isinstance(tree, dict):
        return {key: _filled(part, values) for key, part in tree.items()}
    if isinstance(tree, list):
        return [_filled(part, values) for part in tree]
    for name, value in values.items():
        tree = tree.replace(f"{{{name}}}", value) if isinstance(tree, str) else tree
    return tree


def _is_trained(config: Path, overrides: Sequence[str], folder: Path) -> bool:
    """Whether the last attempt ended well at run.steps, with an export."""
    if not (folder / "hf").is_dir() or not (folder / EXIT_CODE_FILE).is_file():
        return False
    steps = load_config(config, overrides).config.run.steps
    return newest_step(folder) == steps and read_exit_code(folder / EXIT_CODE_FILE, ExitCode.FAILED) == ExitCode.OK


def run_paper(study: Study, names: Sequence[str], *, cluster: Path | None, dry_run: bool) -> Iterator[str]:
    """Runs or submits what the artefacts lack, and yields lines to print: progress, then tables and paths of figures.

    Raises ConfigError for a folder of another study, and PacsError with the exit code of a node that failed.
    """
    found = study.artefacts(names)
    chains = list(study.chains(list(found.values())))
    if dry_run:
        groups = [("before all", tuple(study.prepare())), *((chain.name, chain.nodes) for chain in chains)]
        for name, nodes in groups:
            for node in nodes:
                yield f"{name} {node.label}: {'done' if node.is_done() else 'missing'}  python {' '.join(node.words)}"
        return
    with RunLock(study.base, "paper"):
        _check_study(study)
        for node in study.prepare():
            yield from _run("before all", node)
        if cluster is not None:
            missing = [chain for chain in chains if not all(node.is_done() for node in chain.nodes)]
            for chain in missing:
                yield from _submit(chain, cluster)
            if missing:
                yield "the same command prints the tables when these jobs have ended"
                return
        for number, chain in enumerate(chains, start=1):
            for node in chain.nodes:
                yield from _run(f"{number}/{len(chains)} {chain.name}", node)
        for name, entry in found.items():
            yield from _artefact(study, name, entry)


def _check_study(study: Study) -> None:
    """Raises ConfigError where the folder was made with other overrides; else notes them."""
    path = study.base / STUDY_FILE
    mine = {"scale": study.scale, "overrides": list(study.overrides)}
    if path.is_file() and read_object(path) != mine:
        raise ConfigError(f"{study.base} has a study with {read_object(path)}, got {mine}; choose another --dir")
    write_atomically(path, [json.dumps(mine).encode() + b"\n"])


def _run(name: str, node: Node) -> Iterator[str]:
    """One node, unless it is done."""
    if node.is_done():
        return
    yield f"{name}: {node.label}"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # A killed `paper` leaves no run behind: the run gets SIGTERM, saves and stops.
    process = subprocess.Popen(
        [sys.executable, *node.words], cwd=node.cwd, env=environment, stdout=sys.stderr, preexec_fn=_with_parent
    )
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the terminal sends it to the run too, which saves and stops
        process.wait()
        raise
    if code == 0 and not node.is_done():
        code = ExitCode.FAILED
    if code:
        error = PacsError(f"{name}: {node.label} ended with exit code {code}; the same command continues there")
        error.exit_code = ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED
        raise error


def _with_parent() -> None:
    die_with_parent(signal.SIGTERM)


def _submit(chain: Chain, cluster: Path) -> Iterator[str]:
    """Submits the missing nodes of a chain as jobs that depend on each other, unless some are queued."""
    from pacs_megatron.config.cluster import load_cluster
    from pacs_megatron.launch.job import job_states, known_jobs
    from pacs_megatron.launch.request import Request
    from pacs_megatron.launch.submit import submit
    from pacs_megatron.runtime.run_folder import run_folder

    run_dir = run_folder(load_config(chain.config, chain.overrides))
    queued = job_states(list(known_jobs(run_dir)))
    if queued:
        yield f"{chain.name}: in the queue: {', '.join(queued)}"
        return
    missing = [node for node in chain.nodes if not node.is_done()]
    request = Request(
        config=chain.config,
        overrides=chain.overrides,
        cluster=load_cluster(cluster),
        train=missing[0].label == "train",
        later=tuple((node.label, node.words[len(PRODUCT) :]) for node in missing if node.label != "train"),
    )
    yield from submit(request, dry_run=False)


# ---------------------------------------------------------------------------------------------------- tables and figures
def _artefact(study: Study, name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Writes <name>.json and <name>.txt, and the pages of a figure; yields the table and the paths of the pages."""
    from pacs_megatron.evaluation.compare import compare
    from pacs_megatron.evaluation.compare_page import compare_html
    from pacs_megatron.evaluation.diversity import diversity_page, load_vectors
    from pacs_megatron.evaluation.paper_tables import Cell, diversity_cells, pass_cells, table_text

    cells: list[Cell] = []
    pages: list[tuple[Path, str]] = []
    embedder = ""
    kind, methods = entry.get("kind", "passes"), study.methods_of(entry)
    for model in entry["models"]:
        runs = {method: study.runs(model, method) for method in methods}
        if kind in ("curves", "exploration"):
            text = compare_html(compare([run for found in runs.values() for run in found]))
            pages.append((study.base / f"{name}-{model}.html", text))
        if kind in ("diversity", "exploration"):
            files = {method: [run / VECTORS for run in found] for method, found in runs.items()}
            known = study.spec.get("published_diversity", {}).get(model, {})
            for benchmark in study.spec["diversity"]:
                cells += diversity_cells(model, benchmark, files, known)
            embedder, vectors = load_vectors([file for found in files.values() for file in found])
            if kind == "exploration":
                pages.append((study.base / f"{name}-{model}-pca.html", diversity_page(embedder, vectors)[1]))
        for benchmark in entry.get("benchmarks", ()):
            folder = study.evaluation_of[benchmark]
            evaluations = {method: [run / folder for run in found] for method, found in runs.items()}
            ks, known = entry.get("k", study.spec["k"]), _by_k(study.spec, model)
            cells += pass_cells(model, benchmark, ks, evaluations, known)
    beside = "published" if "published" in study.spec else "nothing published for this model and task"
    unit = "pass@k in %" if not embedder else f"mean cosine distance of correct responses; embedder: {embedder}"
    head = f"{name}: {unit}. Ours [95 % bootstrap over seeds and problems] / {beside}"
    text = f"{head}\n\n{table_text(cells)}"
    write_atomically(study.base / f"{name}.json", [json.dumps([asdict(c) for c in cells], indent=1).encode(), b"\n"])
    write_atomically(study.base / f"{name}.txt", [text.encode(), b"\n"])
    yield f"\n{text}"
    for path, page in pages:
        write_atomically(path, [page.encode()])
        yield str(path)


def _by_k(spec: Mapping[str, Any], model: str) -> dict[str, dict[str, dict[int, float]]]:
    """Method -> benchmark -> k -> published per cent."""
    return {
        method: {benchmark: dict(zip(spec["k"], values, strict=False)) for benchmark, values in found.items()}
        for method, found in spec.get("published", {}).get(model, {}).items()
    }
