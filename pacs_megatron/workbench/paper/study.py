"""`paper`: train -> evaluate -> diversity -> tables and figures of arXiv:2509.02522, on this host
or through Slurm.

`configs/paper/studies/` lists methods, artefacts and published numbers. A node is done when its
output is complete. A call runs the missing nodes; for a finished study it only prints the tables.
Interrupted runs and evaluations resume.
"""

import itertools
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
_CHANGED_BY_YAML = ('"', "\\", ": ", " #", "  ")
_SET = ("model", "model.path", "run", "run.dir", "run.name", "run.seed")


@dataclass(frozen=True, slots=True)
class StudyNode:
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
    nodes: tuple[StudyNode, ...]

    @property
    def missing(self) -> list[StudyNode]:
        """The nodes that are not done."""
        return [node for node in self.nodes if not node.is_done()]


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
        _check_yaml_keeps(base)

        self._configs = shipped_folder("configs").resolve()
        self.file = self._configs / "paper" / "studies" / f"{scale}.yaml"
        with parsing(str(self.file), ConfigError):
            self._read(seeds)
        if "prepare" in self.spec and not (self._configs.parent / "examples").is_dir():
            raise ConfigError(
                f"--scale {scale} needs examples/quickstart/ of a checkout; run it there"
            )

    def _read(self, seeds: int | None) -> None:
        """Reads the study's file. Raises what `parsing` turns into a ConfigError."""
        text = self.file.read_text(encoding="utf-8").replace("{dir}", str(self.base))
        spec: Any = parse_yaml(text, f"{self.scale}.yaml").plain()
        self.spec: dict[str, Any] = spec
        self.seeds: int = seeds or self.spec["seeds"]
        if self.seeds > _MAX_SEEDS:
            raise ConfigError(f"--seeds {self.seeds}, expected at most {_MAX_SEEDS}")

        self.evaluation_of = {}
        for name, entry in self.spec["evaluations"].items():
            for benchmark in load_config(*self._file(entry)).config.evaluation.benchmarks:
                self.evaluation_of[benchmark.name] = name

        for methods in self.spec.get("published", {}).values():
            for rows in methods.values():
                for row in rows.values():
                    is_complete = len(row) in (1, len(self.spec["k"]))
                    assert is_complete and sum(row) > 0, f"published: {row}"
        for averages in self.spec.get("published_averages", {}).values():
            assert sum(averages.values()) > 0, f"published_averages: {averages}"

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
        names = [f"{method}-s{seed}" for seed in range(self.seeds)]
        if method == "base":
            names = ["base"]
        return [self.base / f"{model}-{name}" for name in names]

    def _file(
        self, words: Sequence[str], model: str = "", common: Sequence[str] = ()
    ) -> tuple[Path, tuple[str, ...]]:
        """(file, overrides) of an entry of the study."""
        path = self._configs / words[0].replace("{model}", model)
        return path.resolve(), (*words[1:], *common)

    def nodes(self, entries: Sequence[Any]) -> tuple[list[StudyNode], list[Chain]]:
        """The nodes that these artefacts need.

        Returns:
            The nodes before all runs, and a chain with evaluations for each run.

        Raises:
            ConfigError: a configuration of the study is not valid.
        """
        first = []
        for name, entry in self.spec.get("prepare", {}).items():
            is_done = Path(entry["done"]).exists
            words = tuple(entry["python"])
            first.append(StudyNode(name, words, is_done, self._configs.parent))

        outputs: dict[tuple[str, str], set[str]] = {}
        for entry in entries:
            names = self._outputs(entry)
            for model in entry["models"]:
                for method in entry["methods"]:
                    outputs.setdefault((model, method), set()).update(names)

        chains = []
        for (model, method), names in outputs.items():
            for seed, folder in enumerate(self.runs(model, method)):
                chains.append(self._chain(model, method, names, seed, folder))
        return first, chains

    def _outputs(self, entry: Mapping[str, Any]) -> set[str]:
        """Names of the evaluations that an artefact needs, and `diversity`."""
        benchmarks = entry.get("benchmarks", self.spec["diversity"])
        names = {self.evaluation_of[benchmark] for benchmark in benchmarks}
        if entry.get("kind") in ("diversity", "exploration"):
            names.add("diversity")
        return names

    def _chain(self, model: str, method: str, outputs: set[str], seed: int, folder: Path) -> Chain:
        """The nodes of one run.

        Args:
            model: key of the study's models.
            method: key of the study's methods, or `base`.
            outputs: evaluations to make, and `diversity`.
            seed: of the run.
            folder: of the run.
        """
        entry = self.spec["models"][model]
        is_base = method == "base"
        common = (
            *entry.get("overrides", ()),
            f"model.path={entry['base']}",
            f"run.dir={self.base}",
            f"run.name={folder.name}",
            f"run.seed={seed}",
            *self.overrides,
        )
        words = self.spec["evaluations"]["eval"] if is_base else self.spec["methods"][method]
        config, overrides = self._file(words, model, common)
        files = [(config, overrides)]

        nodes = []
        if not is_base:
            is_done = partial(_is_trained, config, overrides, folder)
            nodes.append(StudyNode("train", (*PRODUCT, "train", str(config), *overrides), is_done))
        source = entry["base"] if is_base else str(folder)
        for name, evaluation in self.spec["evaluations"].items():
            if name not in outputs:
                continue
            file, changes = self._file(evaluation, common=common)
            files.append((file, changes))
            places = ("--model", source, "--out", str(folder / name))
            command = (*PRODUCT, "eval", str(file), *changes, *places)
            nodes.append(StudyNode(name, command, (folder / name / "results.json").is_file))
        if "diversity" in outputs:
            nodes.append(self._diversity_node(folder))

        # Before the first run starts. The files of the other seeds differ in the seed only.
        if seed == 0:
            for file, changes in files:
                load_config(file, changes)
        return Chain(folder, config, overrides, tuple(nodes))

    def _diversity_node(self, folder: Path) -> StudyNode:
        words = (
            *(*PRODUCT, "diversity", str(folder), "--embedder", self.spec["embedder"]),
            *("--benchmark", *self.spec["diversity"]),
            *("--out", str(folder / "diversity.html"), "--save", str(folder / VECTORS)),
        )
        return StudyNode("diversity", words, (folder / VECTORS).is_file)


def _check_yaml_keeps(base: Path) -> None:
    """Raises ConfigError if the path means something else inside a YAML text."""
    text = str(base)
    if not text.isprintable() or any(part in f"{text} " for part in _CHANGED_BY_YAML):
        raise ConfigError(
            f"--dir {base}: YAML reads {chr(34)}, \\, `: `, ` #` or two spaces otherwise; rename it"
        )


def _is_trained(config: Path, overrides: Sequence[str], folder: Path) -> bool:
    """Whether the last attempt ended with exit code 0 at run.steps, with an export."""
    code_file = folder / EXIT_CODE_FILE
    has_code = code_file.is_file()
    ended_well = has_code and read_exit_code(code_file, ExitCode.FAILED) == ExitCode.OK
    steps = load_config(config, overrides).config.run.steps
    return ended_well and (folder / "hf").is_dir() and newest_step(folder) == steps


# ---------------------------------------------------------------------------------- running a study
def run_study(
    study: Study, names: Sequence[str], *, cluster: Path | None, dry_run: bool
) -> Iterator[str]:
    """Runs or submits the missing nodes of the artefacts.

    Yields progress lines, then tables and paths of figures.

    Raises:
        ConfigError: the folder belongs to another study.
        PacsError: with the exit code of a node that failed.
    """
    with parsing(str(study.file), ConfigError):
        artefacts = study.artefacts(names)
        first, chains = study.nodes(list(artefacts.values()))
    folders = (study.base, *study.base.parents)
    nearest = next(folder for folder in folders if os.path.lexists(folder))
    if not nearest.is_dir():
        raise ConfigError(f"{study.base} is not a folder, or below a file; choose another --dir")
    if cluster is not None:
        load_cluster(cluster)
    if dry_run:
        yield from _states(first, chains)
        return

    with RunLock(study.base, "paper"):
        _claim_folder(study)
        for node in first:
            yield from _run("first", node)

        unfinished = [chain for chain in chains if chain.missing]
        for chain in unfinished:
            yield from _submit_or_reject(chain, cluster)
        if cluster is not None and unfinished:
            yield "the same command prints the tables when these jobs have ended"
            return

        for number, chain in enumerate(chains, start=1):
            for node in chain.nodes:
                yield from _run(f"{number}/{len(chains)} {chain.folder.name}", node)
        for name, entry in artefacts.items():
            yield from _artefact(study, name, entry)


def _states(first: Sequence[StudyNode], chains: Sequence[Chain]) -> Iterator[str]:
    """A line for each node: whether it is done, and its command."""
    named = [("first", node) for node in first]
    for chain in chains:
        named += [(chain.folder.name, node) for node in chain.nodes]
    for name, node in named:
        state = "done" if node.is_done() else "missing"
        yield f"{name} {node.label}: {state}  python {' '.join(node.words)}"


def _claim_folder(study: Study) -> None:
    """Writes the identity of the study. Raises ConfigError if the folder has another one."""
    identity = {"scale": study.scale, "overrides": list(study.overrides)}
    path = study.base / "study.json"
    if path.is_file() and read_object(path) != identity:
        raise ConfigError(
            f"{study.base} has a study with {read_object(path)}, got {identity}; choose another "
            "--dir"
        )
    write_atomically(path, [json.dumps(identity).encode() + b"\n"])


def _submit_or_reject(chain: Chain, cluster: Path | None) -> Iterator[str]:
    """Submits an unfinished chain to a cluster. Raises ConfigError if its jobs wait without one."""
    queued = ", ".join(job_states(list(known_jobs(chain.folder))))
    if cluster is None:
        if queued:
            raise ConfigError(
                f"{chain.folder}: in the queue: {queued}; wait for these jobs, or pass --cluster"
            )
    elif queued:
        yield f"{chain.folder.name}: in the queue: {queued}"
    else:
        yield from _submit(chain, cluster)


def _run(name: str, node: StudyNode) -> Iterator[str]:
    """Runs a node, unless it is done; yields lines to print."""
    if node.is_done():
        return
    yield f"{name}: {node.label}"
    process = subprocess.Popen(
        [sys.executable, *node.words],
        cwd=node.cwd,
        stdout=sys.stderr,
        # If `paper` is killed, the run gets SIGTERM, saves and stops.
        preexec_fn=partial(die_with_parent, signal.SIGTERM),
    )
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # The terminal also sends it to the run, which saves and stops.
        process.wait()
        raise

    if code or not node.is_done():
        error = PacsError(
            f"{name}: {node.label} ended with exit code {code}; the same command continues there"
        )
        is_known = code and code in set(ExitCode)
        error.exit_code = ExitCode(code) if is_known else ExitCode.FAILED
        raise error


def _submit(chain: Chain, cluster: Path) -> Iterator[str]:
    """Submits the missing nodes of a chain as jobs that depend on each other."""
    from pacs_megatron.launch.batch_script import Submission
    from pacs_megatron.launch.submit import submit

    missing = chain.missing
    if not missing:  # its last job ended meanwhile
        return
    later = []
    for node in missing:
        if node.label != "train":
            later.append((node.label, node.words[len(PRODUCT) :]))
    request = Submission(
        config=chain.config,
        overrides=chain.overrides,
        cluster=load_cluster(cluster),
        later=tuple(later),
        # The study's user chose it; the warning is printed.
        force=True,
        train=missing[0].label == "train",
    )
    yield from submit(request, dry_run=False)


# ------------------------------------------------------------------------------- tables and figures
def _artefact(study: Study, name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    """Writes <name>.json and <name>.txt, and the pages of a figure.

    Yields the table and the paths of the pages.
    """
    from pacs_megatron.workbench.compare.compare import compare
    from pacs_megatron.workbench.compare.page import compare_html
    from pacs_megatron.workbench.diversity import load_vectors
    from pacs_megatron.workbench.paper.exploration import exploration_page
    from pacs_megatron.workbench.paper.tables import (
        Cell,
        average_cells,
        diversity_cells,
        pass_cells,
        table_text,
    )

    spec = study.spec
    kind = entry.get("kind")
    unit = "pass@k in %"
    cells: list[Cell] = []
    pages: dict[Path, str] = {}
    for model in entry["models"]:
        runs = {method: study.runs(model, method) for method in entry["methods"]}
        all_runs = list(itertools.chain.from_iterable(runs.values()))
        if kind in ("curves", "exploration"):
            pages[study.base / f"{name}-{model}.html"] = compare_html(compare(all_runs))
        if kind in ("diversity", "exploration"):
            embedder, vectors = load_vectors([run / VECTORS for run in all_runs])
            unit = f"mean cosine distance of correct responses; embedder: {embedder}"
            if kind == "exploration":
                overlaid = {method: runs[method] for method in entry["overlay"]}
                title = f"Exploration: {', '.join(overlaid)} on {model}"
                page = exploration_page(title, embedder, overlaid, vectors)
                pages[study.base / f"{name}-{model}-pca.html"] = page
            published = spec.get("published_diversity", {}).get(model, {})
            for benchmark in spec["diversity"]:
                cells += diversity_cells((model, benchmark), runs, vectors, published)

        for benchmark in entry.get("benchmarks", ()):
            evaluation = study.evaluation_of[benchmark]
            folders = {}
            for method, method_runs in runs.items():
                folders[method] = [run / evaluation for run in method_runs]
            ks = entry.get("k", spec["k"])
            published = _published(spec, model, benchmark, ks)
            cells += pass_cells((model, benchmark), ks, folders, published)
        if entry.get("average"):
            evaluations = {}
            for method, method_runs in runs.items():
                evaluations[method] = {
                    name: [run / study.evaluation_of[name] for run in method_runs]
                    for name in entry["benchmarks"]
                }
            published = spec.get("published_averages", {}).get(model, {})
            cells += average_cells(model, evaluations, published)

    beside = "nothing published for this model and task"
    if "published" in spec:
        beside = f"published ({spec['published_from']})"
    text = (
        f"{name}: {unit}. Ours [95 % bootstrap over seeds and problems] / {beside}\n\n"
        f"{table_text(cells)}"
    )
    record = json.dumps([asdict(cell) for cell in cells], indent=1)
    write_atomically(study.base / f"{name}.json", [record.encode(), b"\n"])
    write_atomically(study.base / f"{name}.txt", [text.encode(), b"\n"])
    yield f"\n{text}"
    for path, page in pages.items():
        write_atomically(path, [page.encode()])
        yield str(path)


def _published(
    spec: Mapping[str, Any], model: str, benchmark: str, ks: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Method -> k -> published pass@k in per cent.

    A row has one number for each k of the study, or of the artefact where it has as many; or pass@1
    alone.
    """
    row_ks = ks if len(ks) == len(spec["k"]) else spec["k"]
    numbers = {}
    for method, benchmarks in spec.get("published", {}).get(model, {}).items():
        numbers[method] = dict(zip(row_ks, benchmarks.get(benchmark, ()), strict=False))
    return numbers
