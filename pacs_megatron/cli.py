"""`pacs-megatron <verb>`: the command line. Each verb imports its modules when it runs, so `--help` is fast."""

from __future__ import annotations

import argparse
import importlib
import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pacs_megatron import __version__
from pacs_megatron.errors import ExitCode
from pacs_megatron.runtime.command_line import OneLineParser, check_arguments, integer_from, path_from, run_command
from pacs_megatron.runtime.shipped import cluster_file, run_file
from pacs_megatron.runtime.waiting import report_wait

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which printed files must not send to the terminal; tabs and line ends stay."""
Verb = Callable[..., "str | Iterable[str] | int | tuple[str, int]"]
"""Receives the parsed arguments by name; returns the text or lines to print, the exit code, or both."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code. Every error is one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack characters of a file
    return run_command(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    check_arguments(arguments)
    options = vars(_parse(arguments))
    result, code = function_of(options.pop("run_verb"))(**options), int(ExitCode.OK)
    if isinstance(result, int):
        return result
    if isinstance(result, tuple):
        result, code = result
    for text in [result] if isinstance(result, str) else result:
        print(_CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text), flush=True)
    return code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments. Unlike argparse, accepts overrides after options."""
    parser = build_parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest and hasattr(parsed, "overrides") and all("=" in word and not word.startswith("-") for word in rest):
        parsed.overrides.extend(rest)
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return parsed


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = OneLineParser(prog="pacs-megatron", description="Post-train reasoning models with PACS on Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"pacs-megatron {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="<verb>", required=True)
    _add_config_verb(verbs, "train", "train; the same command resumes a run", "launch.train:run_train")
    _add_evaluation(verbs)
    _add_groups(verbs)
    _add_convert(verbs)
    _add_planning(verbs)
    return parser


def function_of(place: Verb | str) -> Any:
    """The function of a verb, which may be given as `module:function` of this package."""
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    with report_wait("for the modules of this command to load"):
        return getattr(importlib.import_module(f"pacs_megatron.{module}"), name)


def _add_verb(verbs: _SubParsers, name: str, text: str, run_verb: Verb | str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text)
    parser.set_defaults(run_verb=run_verb)
    return parser


def _add_config_verb(verbs: _SubParsers, name: str, text: str, run_verb: Verb | str) -> argparse.ArgumentParser:
    parser = _add_verb(verbs, name, text, run_verb)
    parser.add_argument("config_path", metavar="config", type=run_file, help="a YAML file, or a name in configs/runs/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as optimizer.lr=1e-6; the last one wins"
    )
    return parser


def _add_run_verb(verbs: _SubParsers, name: str, text: str, place: str) -> argparse.ArgumentParser:
    parser = _add_verb(verbs, name, text, place)
    parser.add_argument("run_dir", metavar="run", type=path_from, help="the run folder")
    return parser


def _add_group(verbs: _SubParsers, name: str, text: str) -> _SubParsers:
    group = verbs.add_parser(name, help=text, description=text)
    return group.add_subparsers(title="verbs", metavar="<verb>", required=True)


def _add_no_verify(parser: argparse.ArgumentParser, dest: str) -> None:
    parser.add_argument(
        "--no-verify", dest=dest, action="store_false", help="do not check digests; the output records it"
    )


def _add_evaluation(verbs: _SubParsers) -> None:
    parser = _add_config_verb(verbs, "eval", "pass@k of a model on the configured benchmarks", _eval)
    parser.add_argument("--model", nargs="+", default=[], help="model folders, runs or checkpoints, not model.path")
    parser.add_argument("--out", type=path_from, help="folder for the results; default: <run folder>/eval")
    parser.add_argument("--rejudge", action="store_true", help="judge the existing samples again, without sampling")
    _add_no_verify(parser, "verify")
    parser = _add_verb(verbs, "compare", "compare runs that differ in configuration and seed", _compare)
    parser.add_argument("runs", type=path_from, nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--out", type=path_from, default=Path("compare.html"), help="the page (default: compare.html)")
    for form in ("json", "csv", "latex"):
        parser.add_argument(f"--{form}", type=path_from, metavar="FILE", help=f"also write the figures as {form}")
    parser = _add_verb(verbs, "diversity", "diversity of the correct responses of evaluations", _diversity)
    parser.add_argument("paths", type=path_from, nargs="+", metavar="RUN|RESULTS", help="runs, or folders of `eval`")
    parser.add_argument("--embedder", default="Qwen/Qwen3-Embedding-0.6B", help="a model, or `hashed` (for tests)")
    parser.add_argument("--out", type=path_from, default=Path("diversity.html"), help="page (default: diversity.html)")
    parser.add_argument("--benchmark", nargs="+", default=[], help="names of benchmarks; default: all")
    parser.add_argument("--save", type=path_from, metavar="FILE", help="also write the embeddings, as .npz")
    parser = _add_run_verb(verbs, "export", "write a run's weights for Hugging Face", "launch.runs:export")
    parser.add_argument("--step", type=integer_from(0), help="the checkpoint to export; default: the newest")
    parser.add_argument("--out", type=path_from, help="target folder; default: <run>/hf_exports/step_<n>")
    _add_no_verify(parser, "verify")


def _add_groups(verbs: _SubParsers) -> None:
    config = _add_group(verbs, "config", "show or explain a configuration")
    _add_config_verb(config, "show", "the resolved configuration with each key's origin", "config.explain:show")
    parser = _add_config_verb(config, "explain", "values derived from the configuration", "config.explain:explain")
    parser.add_argument("--ranks", type=integer_from(1), help="number of ranks; default: as `train` starts here")
    _add_verb(config, "schema", "the JSON schema of a run file, for editors", "config.explain:schema_json")
    data = _add_group(verbs, "data", "inspect the data")
    parser = _add_config_verb(data, "preview", "prompts, counts, verified answers", "evaluation.preview:preview_text")
    parser.add_argument("--rows", type=integer_from(0), default=3, help="prompts to print (default: 3)")


def _add_convert(verbs: _SubParsers) -> None:
    group = _add_group(verbs, "convert", "between Hugging Face and Megatron checkpoints")
    to_megatron = _add_verb(group, "to-megatron", "Hugging Face -> Megatron", "convert.commands:to_megatron")
    to_hf = _add_verb(group, "to-hf", "Megatron (converted or of a run) -> Hugging Face", "convert.commands:to_hf")
    verify = _add_verb(group, "verify", "compare both tensor by tensor", "convert.commands:verify")
    for parser in (to_megatron, verify):
        parser.add_argument("--hf", required=True, metavar="DIR_OR_HUB_ID", help="folder or hub id")
    for parser in (to_hf, verify):
        parser.add_argument("--checkpoint", required=True, type=path_from, metavar="CKPT", help="checkpoint or run")
        parser.add_argument("--step", type=integer_from(0), help="step of the run's checkpoint (default: the newest)")
    for parser in (to_megatron, to_hf):
        parser.add_argument("--out", required=True, type=path_from, metavar="DIR", help="target; must not exist")
        parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="cast the weights (default: as they are)")
        parser.add_argument("--verify", action="store_true", help="read the result back and compare every bit")
    _add_no_verify(to_hf, "verify_source")
    verify.add_argument("--certificate", required=True, type=path_from, metavar="FILE", help="JSON file to write")
    verify.add_argument("--logits", action="store_true", help="also compare logits with transformers")
    for axis in ("tp", "pp", "ep"):
        verify.add_argument(f"--{axis}", type=integer_from(1), default=1, help=f"{axis} with --logits (default: 1)")
    verify.add_argument("--logits-dtype", dest="dtype", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    verify.add_argument("--trust-remote-code", action="store_true", help="with --logits: run code of the checkpoint")


def _add_planning(verbs: _SubParsers) -> None:
    parser = _add_config_verb(verbs, "plan", "estimate memory and time of a run, without a GPU", _plan)
    parser.add_argument("--search", action="store_true", help="compare all layouts of the same GPUs")
    parser.add_argument("--compare", action="store_true", help="compare H100 and H200, with and without recomputation")
    parser = _add_config_verb(verbs, "preflight", "check a run before submission, or inside its job", _preflight)
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    parser.add_argument("--cluster", type=cluster_file, help="also check this file, or a name in configs/clusters/")
    parser.add_argument("--skip-servers", dest="start_servers", action="store_false", help="start no SGLang server")
    parser = _add_config_verb(verbs, "certify", "compare a tiny run of this configuration with a reference", _certify)
    parser.add_argument("--out", type=path_from, help="folder of the certificate; default: <run folder>/certificate")
    _add_config_verb(verbs, "fetch", "download model, tokenizer and data for jobs", "launch.fetch:fetch")
    _add_jobs(verbs)
    parser = _add_verb(verbs, "paper", "run and print tables and figures of the PACS paper", _paper)
    parser.add_argument("overrides", nargs="+", metavar="TABLE|FIGURE", help="or all; and key=value for all runs")
    parser.add_argument("--scale", choices=("paper", "laptop"), default="paper", help="laptop: two cores")
    parser.add_argument("--dir", type=path_from, help="folder of the runs and tables; default: runs/paper-<scale>")
    parser.add_argument("--seeds", type=integer_from(1), help="runs of each method; default: 1, or 3 on a laptop")
    parser.add_argument("--cluster", type=cluster_file, help="submit what is missing to Slurm; default: run here")
    parser.add_argument("--dry-run", action="store_true", help="only print the nodes of the DAG with their state")
    _add_verb(verbs, "doctor", "report what works on this machine and what to install", "preflight.doctor:report")


def _add_jobs(verbs: _SubParsers) -> None:
    parser = _add_config_verb(verbs, "submit", "submit a run or a sweep to Slurm", _submit)
    parser.add_argument("--cluster", type=cluster_file, required=True, help="a file, or a name in configs/clusters/")
    parser.add_argument("--dry-run", action="store_true", help="only print batch scripts and resolved configurations")
    parser.add_argument("--sweep", action="append", default=[], metavar="key=a,b,c", help="one run per value")
    parser.add_argument("--seeds", type=integer_from(1), default=1, help="number of runs: run.seed, run.seed + 1, ...")
    parser.add_argument("--convert", action="store_true", help="first convert the model to Megatron, in another job")
    parser.add_argument("--evaluate", action="store_true", help="then evaluate the exported model, in another job")
    _add_run_verb(verbs, "status", "attempts, jobs, checkpoint and last metrics of a run", "launch.runs:status")
    parser = _add_run_verb(verbs, "logs", "print the end of a run's log", "launch.runs:log_lines")
    parser.add_argument("--attempt", type=integer_from(1), help="number of the attempt; default: the latest")
    parser.add_argument("--lines", dest="num_lines", type=integer_from(1), default=40, help="number (default: 40)")
    parser.add_argument("--follow", action="store_true", help="print new lines as they are written")
    parser = _add_run_verb(verbs, "cancel", "cancel a run's jobs", "launch.runs:cancel")
    parser.add_argument("--save", action="store_true", help="request a save and stop instead")


_SubParsers: TypeAlias = "argparse._SubParsersAction[OneLineParser]"


def _eval(*, overrides: list[str], model: list[str], **options: Any) -> str:
    # Overrides may follow the list of models.
    models = [word for word in model if "=" not in word or Path(word).exists()]
    overrides = [*overrides, *(word for word in model if word not in models)]
    return str(function_of("training.eval_main:run_eval")(overrides=overrides, models=models, **options))


def _compare(*, runs: list[Path], out: Path, **files: Path | None) -> list[str]:
    from pacs_megatron.evaluation import compare_page
    from pacs_megatron.evaluation.compare import compare
    from pacs_megatron.runtime.files import write_outputs

    with report_wait("for the runs to be compared"):
        found = compare(runs)
        paths = {"html": out, **{form: path for form, path in files.items() if path is not None}}
        outputs = [(path, getattr(compare_page, f"compare_{form}")(found).encode()) for form, path in paths.items()]
    write_outputs(outputs)
    return [*found.sentences(), str(out)]


def _diversity(*, paths: list[Path], embedder: str, benchmark: list[str], out: Path, save: Path | None) -> list[str]:
    from pacs_megatron.evaluation.diversity import diversity_page, embedded, vectors_file
    from pacs_megatron.runtime.files import write_outputs

    described, vectors = embedded(paths, embedder, benchmark)
    lines, text = diversity_page(described, vectors)
    vectors_of = [] if save is None else [(save, vectors_file(described, vectors))]
    write_outputs([(out, text.encode()), *vectors_of])
    return [*lines, str(out)]


def _plan(**options: Any) -> tuple[str, int]:
    text, fits = function_of("plan.plan:run_plan")(**options)
    return text, ExitCode.OK if fits else ExitCode.MISCONFIGURED


def _preflight(*, as_json: bool, **options: Any) -> tuple[str, int] | int:
    run_everywhere, render = function_of("preflight.ranks:run_everywhere"), function_of("preflight.run:render")
    with report_wait("for the checks, which are printed together"):
        checks = run_everywhere(**options)
    code = ExitCode.MISCONFIGURED if any(check.level == "fail" for check in checks) else ExitCode.OK
    return (render(checks, as_json=as_json), code) if checks else code


def _certify(**options: Any) -> tuple[str, int] | int:
    certificate = function_of("certify.run:certify")(**options)
    if certificate is None:  # a rank of a job that does not report
        return ExitCode.OK
    return certificate.line(), ExitCode.OK if certificate.is_green else ExitCode.FAILED


def _submit(*, config_path: Path, cluster: Path, dry_run: bool, **options: Any) -> Iterable[str]:
    submit, request_of = function_of("launch.submit:submit"), function_of("launch.batch_script:Request")
    site = function_of("config.cluster:load_cluster")(cluster)
    return submit(request_of(config=config_path, cluster=site, **options), dry_run=dry_run)  # type: ignore[no-any-return]


def _paper(*, overrides: list[str], scale: str, dir: Path | None, seeds: int | None, **options: Any) -> Iterable[str]:
    from pacs_megatron.launch.paper import Study, run_paper

    names, changes = ([word for word in overrides if ("=" in word) == wanted] for wanted in (False, True))
    study = Study(scale, (dir or Path("runs", f"paper-{scale}")).absolute(), changes, seeds)
    return run_paper(study, names, **options)
