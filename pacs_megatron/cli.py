"""`pacs-megatron <verb>`: the command line. Each verb imports its modules when it runs, so `--help` is fast."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from pacs_megatron import __version__
from pacs_megatron.runtime.command_line import OneLineParser, check_arguments, integer_from, run_command
from pacs_megatron.runtime.shipped import cluster_file, run_file

Verb = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code. Every error is one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a text of a file may not fit the terminal's encoding
    return run_command(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    check_arguments(arguments)
    parsed = _parse(arguments)
    verb: Verb = parsed.run_verb
    return verb(parsed)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse, and accept overrides after options, which argparse does not."""
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
    _add_config_verb(verbs, "train", "train; the same command resumes a run", _train)
    _add_evaluation(verbs)
    _add_groups(verbs)
    _add_convert(verbs)
    _add_planning(verbs)
    return parser


# ------------------------------------------------------------------------------------------------------------- parsing
def _add_verb(verbs: _SubParsers, name: str, text: str, run_verb: Verb) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text)
    parser.set_defaults(run_verb=run_verb)
    return parser


def _add_config_verb(verbs: _SubParsers, name: str, text: str, run_verb: Verb) -> argparse.ArgumentParser:
    parser = _add_verb(verbs, name, text, run_verb)
    parser.add_argument("config", type=run_file, help="a run's YAML file, or the name of one in configs/runs/")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="an override, such as optimizer.lr=1e-6; the last one wins"
    )
    return parser


def _add_group(verbs: _SubParsers, name: str, text: str) -> _SubParsers:
    group = verbs.add_parser(name, help=text, description=text)
    return group.add_subparsers(title="verbs", metavar="<verb>", required=True)


def _add_evaluation(verbs: _SubParsers) -> None:
    from pacs_megatron.convert.commands import NO_VERIFY_HELP

    parser = _add_config_verb(verbs, "eval", "pass@k of a model on the configured benchmarks", _eval)
    parser.add_argument(
        "--model", nargs="+", default=[], help="Hugging Face folders, runs or checkpoints, instead of model.path"
    )
    parser.add_argument("--out", type=Path, help="folder for the results; default: <run folder>/eval")
    parser.add_argument("--rejudge", action="store_true", help="judge the existing samples again, without sampling")
    parser.add_argument("--no-verify", action="store_true", help="do not compare the weights with their certificate")
    parser = _add_verb(verbs, "compare", "compare runs that differ in configuration and seed", _compare)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
    parser.add_argument("--out", type=Path, default=Path("compare.html"), help="the page (default: compare.html)")
    for form in ("json", "csv", "latex"):
        parser.add_argument(f"--{form}", type=Path, metavar="FILE", help=f"also write the figures as {form}")
    parser = _add_verb(verbs, "diversity", "diversity of the correct responses of evaluations", _diversity)
    parser.add_argument("paths", type=Path, nargs="+", metavar="RUN|RESULTS", help="runs, or folders of `eval`")
    parser.add_argument(
        "--embedder", default="Qwen/Qwen3-Embedding-0.6B", help="an embedding model, or `hashed` (for tests)"
    )
    parser.add_argument("--out", type=Path, default=Path("diversity.html"), help="the page (default: diversity.html)")
    parser.add_argument("--benchmark", nargs="+", default=[], help="names of benchmarks; default: all")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the embeddings, as .npz")
    parser = _add_verb(verbs, "export", "write the weights of a run as a Hugging Face checkpoint", _export)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--step", type=integer_from(0), help="the checkpoint to export; default: the newest")
    parser.add_argument("--out", type=Path, help="target folder; default: <run>/hf_exports/step_<n>")
    parser.add_argument("--no-verify", action="store_true", help=NO_VERIFY_HELP)


def _add_groups(verbs: _SubParsers) -> None:
    config = _add_group(verbs, "config", "show or explain a configuration")
    _add_config_verb(config, "show", "the resolved configuration with the origin of each key", _config_show)
    parser = _add_config_verb(config, "explain", "values derived from the configuration", _config_explain)
    parser.add_argument("--ranks", type=integer_from(1), help="number of ranks; default: as `train` starts here")
    _add_verb(config, "schema", "the JSON schema of a run file, for editors", _config_schema)
    data = _add_group(verbs, "data", "inspect the data")
    parser = _add_config_verb(data, "preview", "rendered prompts, counts and verified gold answers", _data_preview)
    parser.add_argument("--rows", type=integer_from(0), default=3, help="prompts to print (default: 3)")


def _add_convert(verbs: _SubParsers) -> None:
    from pacs_megatron.convert.commands import DESCRIPTIONS, add_arguments

    convert = _add_group(verbs, "convert", "between Hugging Face and Megatron checkpoints")
    for verb, text in DESCRIPTIONS.items():
        parser = _add_verb(convert, verb, text, _convert)
        parser.set_defaults(conversion=verb)
        add_arguments(verb, parser)


def _add_planning(verbs: _SubParsers) -> None:
    parser = _add_config_verb(verbs, "plan", "estimate memory and time of a run, without a GPU", _plan)
    parser.add_argument("--search", action="store_true", help="compare all layouts of the same GPUs")
    parser.add_argument("--compare", action="store_true", help="compare H100 and H200, with and without recomputation")
    parser.add_argument("--json", action="store_true", help="print bytes and seconds as JSON")
    parser.add_argument("--response-tokens", type=float, help="mean response length; default: a fraction of the limit")
    parser = _add_config_verb(verbs, "preflight", "check a run before submission, or inside its job", _preflight)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--cluster", type=cluster_file, help="also check this cluster file, or a name in configs/clusters/"
    )
    parser.add_argument("--skip-servers", action="store_true", help="do not start or probe SGLang servers")
    parser = _add_config_verb(verbs, "certify", "compare a tiny run of this configuration with a reference", _certify)
    parser.add_argument("--out", type=Path, help="folder of the certificate; default: <run folder>/certificate")
    _add_config_verb(verbs, "fetch", "download model, tokenizer and data for jobs without a network", _fetch)
    _add_jobs(verbs)
    parser = _add_verb(verbs, "paper", "run and print tables and figures of the PACS paper", _paper)
    parser.add_argument("overrides", nargs="+", metavar="TABLE|FIGURE", help="or all; and key=value for all runs")
    parser.add_argument("--scale", choices=("paper", "laptop"), default="paper", help="laptop: two cores")
    parser.add_argument("--dir", type=Path, help="folder of the runs and tables; default: runs/paper-<scale>")
    parser.add_argument("--seeds", type=integer_from(1), help="runs of each method; default: 1, or 3 on a laptop")
    parser.add_argument("--cluster", type=cluster_file, help="submit what is missing to Slurm; default: run here")
    parser.add_argument("--dry-run", action="store_true", help="only print the nodes of the DAG with their state")
    _add_verb(verbs, "doctor", "report what works on this machine and what to install", _doctor)


def _add_jobs(verbs: _SubParsers) -> None:
    parser = _add_config_verb(verbs, "submit", "submit a run or a sweep to Slurm", _submit)
    parser.add_argument(
        "--cluster", type=cluster_file, required=True, help="a cluster file, or the name of one in configs/clusters/"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print batch scripts and resolved configurations")
    parser.add_argument("--sweep", action="append", default=[], metavar="key=a,b,c", help="one run per value")
    parser.add_argument(
        "--seeds", type=integer_from(1), default=1, help="number of runs, with seeds run.seed, run.seed + 1, ..."
    )
    parser.add_argument(
        "--convert", action="store_true", help="first convert the model to a Megatron checkpoint, in a job of its own"
    )
    parser.add_argument("--evaluate", action="store_true", help="then evaluate the exported model, in a job of its own")
    parser = _add_verb(verbs, "status", "show attempts, jobs, checkpoint and last metrics of a run", _status)
    parser.add_argument("run", type=Path, help="the run folder")
    parser = _add_verb(verbs, "logs", "print the end of a run's log", _logs)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--attempt", type=integer_from(1), help="number of the attempt; default: the latest")
    parser.add_argument("--lines", type=integer_from(1), default=40, help="number of lines (default: 40)")
    parser.add_argument("--follow", action="store_true", help="print new lines as they are written")
    parser = _add_verb(verbs, "cancel", "cancel a run's jobs", _cancel)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--save", action="store_true", help="request a save and stop instead")


_SubParsers: TypeAlias = "argparse._SubParsersAction[OneLineParser]"


# --------------------------------------------------------------------------------------------------------------- verbs
def _train(args: argparse.Namespace) -> int:
    from pacs_megatron.launch.train import run_train

    return run_train(args.config, args.overrides)


def _eval(args: argparse.Namespace) -> int:
    from pacs_megatron.training.eval_main import run_eval

    # Overrides may follow the list of models.
    models = [word for word in args.model if "=" not in word or Path(word).exists()]
    overrides = [*args.overrides, *(word for word in args.model if word not in models)]
    options = {"verify": not args.no_verify, "rejudge": args.rejudge}
    print(run_eval(args.config, overrides, models=models, out=args.out, **options))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from pacs_megatron.evaluation import compare_page
    from pacs_megatron.evaluation.compare import compare
    from pacs_megatron.runtime.files import write_atomically

    found = compare(args.runs)
    write_atomically(args.out, [compare_page.compare_html(found).encode()])
    for path, write in (
        (args.json, compare_page.compare_json),
        (args.csv, compare_page.compare_csv),
        (args.latex, compare_page.compare_latex),
    ):
        if path is not None:
            write_atomically(path, [write(found).encode()])
    print("\n".join([*found.sentences(), str(args.out)]))
    return 0


def _diversity(args: argparse.Namespace) -> int:
    from pacs_megatron.evaluation.diversity import diversity_page, embedded, save_vectors
    from pacs_megatron.runtime.files import write_atomically

    described, vectors = embedded(args.paths, args.embedder, args.benchmark)
    lines, text = diversity_page(described, vectors)
    write_atomically(args.out, [text.encode()])
    if args.save is not None:
        save_vectors(args.save, described, vectors)
    print("\n".join([*lines, str(args.out)]))
    return 0


def _export(args: argparse.Namespace) -> int:
    from pacs_megatron.launch.export import export

    print(export(args.run, step=args.step, out=args.out, verify=not args.no_verify))
    return 0


def _config_show(args: argparse.Namespace) -> int:
    from pacs_megatron.config import load_config
    from pacs_megatron.config.explain import show

    print(show(load_config(args.config, args.overrides)))
    return 0


def _config_explain(args: argparse.Namespace) -> int:
    from pacs_megatron.config import load_config
    from pacs_megatron.config.explain import explain
    from pacs_megatron.config.layout import ranks_to_start

    loaded = load_config(args.config, args.overrides)
    print(explain(loaded, args.ranks if args.ranks is not None else ranks_to_start(loaded.config)))
    return 0


def _config_schema(args: argparse.Namespace) -> int:
    from pacs_megatron.config.explain import schema_json

    print(schema_json())
    return 0


def _data_preview(args: argparse.Namespace) -> int:
    from pacs_megatron.evaluation.preview import preview_text

    print(preview_text(args.config, args.overrides, args.rows))
    return 0


def _convert(args: argparse.Namespace) -> int:
    from pacs_megatron.convert.commands import run
    from pacs_megatron.observability.logs import setup_logging

    setup_logging(None, 0)
    print(run(args.conversion, args))
    return 0


def _plan(args: argparse.Namespace) -> int:
    from pacs_megatron.errors import ExitCode
    from pacs_megatron.plan.plan import run_plan

    text, fits = run_plan(
        args.config,
        args.overrides,
        search=args.search,
        compare=args.compare,
        as_json=args.json,
        response_tokens=args.response_tokens,
    )
    print(text)
    return ExitCode.OK if fits else ExitCode.MISCONFIGURED


def _preflight(args: argparse.Namespace) -> int:
    from pacs_megatron.errors import ExitCode
    from pacs_megatron.preflight.ranks import run_everywhere
    from pacs_megatron.preflight.run import render
    from pacs_megatron.runtime.waiting import report_wait

    with report_wait("for the checks, which are printed together"):
        checks = run_everywhere(args.config, args.overrides, cluster=args.cluster, start_servers=not args.skip_servers)
    if checks:
        print(render(checks, as_json=args.json))
    return ExitCode.MISCONFIGURED if any(check.level == "fail" for check in checks) else ExitCode.OK


def _certify(args: argparse.Namespace) -> int:
    from pacs_megatron.certify.run import certify
    from pacs_megatron.errors import ExitCode

    certificate = certify(args.config, args.overrides, out=args.out)
    if certificate is None:  # a rank of a job that does not report
        return ExitCode.OK
    print(certificate.line())
    return ExitCode.OK if certificate.is_green else ExitCode.FAILED


def _fetch(args: argparse.Namespace) -> int:
    from pacs_megatron.launch.fetch import fetch

    for line in fetch(args.config, args.overrides):
        print(line, flush=True)
    return 0


def _submit(args: argparse.Namespace) -> int:
    from pacs_megatron.config.cluster import load_cluster
    from pacs_megatron.launch.request import Request
    from pacs_megatron.launch.submit import submit

    request = Request(
        config=args.config,
        overrides=tuple(args.overrides),
        cluster=load_cluster(args.cluster),
        sweep=tuple(args.sweep),
        seeds=args.seeds,
        convert=args.convert,
        evaluate=args.evaluate,
    )
    for text in submit(request, dry_run=args.dry_run):
        print(text)
    return 0


def _paper(args: argparse.Namespace) -> int:
    from pacs_megatron.launch.paper import Study, run_paper

    names, overrides = ([word for word in args.overrides if ("=" in word) == wanted] for wanted in (False, True))
    folder = args.dir or Path("runs", f"paper-{args.scale}")
    study = Study(args.scale, folder.resolve(), overrides, args.seeds)
    for text in run_paper(study, names, cluster=args.cluster, dry_run=args.dry_run):
        print(text, flush=True)
    return 0


def _status(args: argparse.Namespace) -> int:
    from pacs_megatron.launch.runs import status

    print(status(args.run))
    return 0


def _logs(args: argparse.Namespace) -> int:
    from pacs_megatron.launch.runs import log_lines

    for line in log_lines(args.run, args.attempt, args.lines, follow=args.follow):
        print(line, flush=args.follow)
    return 0


def _cancel(args: argparse.Namespace) -> int:
    from pacs_megatron.launch.runs import cancel

    print(cancel(args.run, save=args.save))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from pacs_megatron.preflight.doctor import report

    print(report())
    return 0
