"""`pacs-megatron <verb>`: the command line. launch/verbs.py has the function of each verb."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from pacs_megatron import __version__
from pacs_megatron.errors import ExitCode, terminal_text
from pacs_megatron.launch.verbs import VERBS, function_of
from pacs_megatron.runtime.command_line import (
    OneLineParser,
    check_arguments,
    integer_from,
    path_from,
    run_command,
)
from pacs_megatron.runtime.shipped import cluster_file, run_file

_SubParsers: TypeAlias = "argparse._SubParsersAction[OneLineParser]"
_OTHER_WORDS = {verb.split()[1]: verb for verb in VERBS if " " in verb} | {
    "resume": "train, which also resumes",
    "run": "train",
    "stop": "cancel",
}
"""Words that are no verb -> the verb"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code. Every error is one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # The terminal's encoding may lack characters of a file.
            stream.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if arguments is None else arguments
    return run_command(lambda: _run(words))


def _run(arguments: Sequence[str]) -> int:
    """Calls the verb's function, prints its texts, and returns the exit code."""
    check_arguments(arguments)
    options = vars(_parse(arguments))
    verb = function_of(options.pop("place"))
    result = verb(**options)

    if isinstance(result, int):
        return result
    code = int(ExitCode.OK)
    if isinstance(result, tuple):
        result, code = result
    texts = [result] if isinstance(result, str) else result
    for text in texts:
        print(terminal_text(text), flush=True)
    return code


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments. Unlike argparse, accepts overrides after options."""
    parser = build_parser()
    parsed, unknown = parser.parse_known_args(arguments)
    verb: OneLineParser = parsed.__dict__.pop("parser")
    if not unknown:
        return parsed
    are_overrides = all("=" in word and not word.startswith("-") for word in unknown)
    if not are_overrides or not hasattr(parsed, "overrides"):
        hint = ""
        if hasattr(parsed, "overrides"):
            hint = "; options of a run are written as key=value, such as run.steps=5"
        verb.error_of_unknown(unknown, hint)
    parsed.overrides.extend(unknown)
    return parsed


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = OneLineParser(
        prog="pacs-megatron",
        description="Post-train reasoning models with PACS on Megatron-Core.",
    )
    parser.add_argument("--version", action="version", version=f"pacs-megatron {__version__}")
    parser.other_words = _OTHER_WORDS
    verbs = parser.add_subparsers(title="verbs", metavar="<verb>", required=True)
    _add_config_verb(verbs, "train", "train; the same command resumes a run")
    _add_results(verbs)
    _add_config(verbs)
    _add_data(verbs)
    _add_convert(verbs)
    _add_checks(verbs)
    _add_jobs(verbs)
    _add_paper(verbs)
    _add_verb(verbs, "doctor", "report what works on this machine and what to install")
    return parser


# --------------------------------------------------------------------------------------------------
# Kinds of verbs.


def _add_verb(verbs: _SubParsers, verb: str, text: str) -> argparse.ArgumentParser:
    """The parser of `verb`, a key of `VERBS`.

    That of `config show` is `show` in the group `config`.
    """
    parser = verbs.add_parser(verb.split()[-1], help=text, description=text)
    parser.set_defaults(place=VERBS[verb], parser=parser)
    return parser


def _add_config_verb(verbs: _SubParsers, verb: str, text: str) -> argparse.ArgumentParser:
    """A verb that reads a run's configuration."""
    parser = _add_verb(verbs, verb, text)
    parser.add_argument(
        "config_path",
        metavar="config",
        type=run_file,
        help="a YAML file, or a name in configs/runs/",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="such as optimizer.lr=1e-6; the last one wins",
    )
    return parser


def _add_run_verb(verbs: _SubParsers, verb: str, text: str) -> argparse.ArgumentParser:
    """A verb that reads a run's folder."""
    parser = _add_verb(verbs, verb, text)
    parser.add_argument("run_dir", metavar="run", type=path_from, help="the run folder")
    return parser


def _add_group(verbs: _SubParsers, name: str, text: str) -> _SubParsers:
    group = verbs.add_parser(name, help=text, description=text)
    return group.add_subparsers(title="verbs", metavar="<verb>", required=True)


def _add_no_verify(parser: argparse.ArgumentParser, dest: str) -> None:
    parser.add_argument(
        "--no-verify",
        dest=dest,
        action="store_false",
        help="do not check digests; the output records it",
    )


# --------------------------------------------------------------------------------------------------
# The verbs.


def _add_results(verbs: _SubParsers) -> None:
    _add_eval(verbs)
    _add_compare(verbs)
    _add_diversity(verbs)
    _add_export(verbs)


def _add_eval(verbs: _SubParsers) -> None:
    parser = _add_config_verb(verbs, "eval", "pass@k of a model on the configured benchmarks")
    parser.add_argument(
        "--model",
        nargs="+",
        default=[],
        help="model folders, runs or checkpoints, not model.path",
    )
    parser.add_argument(
        "--out",
        type=path_from,
        help="folder for the results; default: <run folder>/eval",
    )
    parser.add_argument(
        "--rejudge",
        action="store_true",
        help="judge the existing samples again, without sampling",
    )
    _add_no_verify(parser, "verify")


def _add_compare(verbs: _SubParsers) -> None:
    parser = _add_verb(verbs, "compare", "compare runs that differ in configuration and seed")
    parser.add_argument("runs", type=path_from, nargs="+", metavar="RUN", help="run folders")
    parser.add_argument(
        "--out",
        type=path_from,
        default=Path("compare.html"),
        help="the page (default: compare.html)",
    )
    for form in ("json", "csv", "latex"):
        parser.add_argument(
            f"--{form}",
            type=path_from,
            metavar="FILE",
            help=f"also write the figures as {form}",
        )


def _add_diversity(verbs: _SubParsers) -> None:
    parser = _add_verb(verbs, "diversity", "diversity of the correct responses of evaluations")
    parser.add_argument(
        "paths",
        type=path_from,
        nargs="+",
        metavar="RUN|RESULTS",
        help="runs, or folders of `eval`",
    )
    parser.add_argument(
        "--embedder",
        default="Qwen/Qwen3-Embedding-0.6B",
        help="a model, or `hashed` (for tests)",
    )
    parser.add_argument(
        "--out",
        type=path_from,
        default=Path("diversity.html"),
        help="page (default: diversity.html)",
    )
    parser.add_argument(
        "--benchmark",
        nargs="+",
        default=[],
        help="names of benchmarks; default: all",
    )
    parser.add_argument(
        "--save",
        type=path_from,
        metavar="FILE",
        help="also write the embeddings, as .npz",
    )


def _add_export(verbs: _SubParsers) -> None:
    parser = _add_run_verb(verbs, "export", "write a run's weights for Hugging Face")
    parser.add_argument(
        "--step",
        type=integer_from(0),
        help="the checkpoint to export; default: the newest",
    )
    parser.add_argument(
        "--out",
        type=path_from,
        help="target folder; default: <run>/hf_exports/step_<n>",
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="then upload it to this repository of the hub, with a model card",
    )
    parser.add_argument(
        "--public",
        action="store_true",
        help="with --push: a new repository is public; default: private",
    )
    _add_no_verify(parser, "verify")


def _add_config(verbs: _SubParsers) -> None:
    config = _add_group(verbs, "config", "show or explain a configuration")
    _add_config_verb(config, "config show", "the resolved configuration with each key's origin")
    parser = _add_config_verb(config, "config explain", "values derived from the configuration")
    parser.add_argument(
        "--ranks",
        type=integer_from(1),
        help="number of ranks; default: as `train` starts here",
    )
    _add_verb(config, "config schema", "the JSON schema of a run file, for editors")


def _add_data(verbs: _SubParsers) -> None:
    data = _add_group(verbs, "data", "inspect the data")
    parser = _add_config_verb(data, "data preview", "prompts, counts, verified answers")
    parser.add_argument(
        "--rows",
        type=integer_from(0),
        default=3,
        help="prompts to print (default: 3)",
    )


def _add_convert(verbs: _SubParsers) -> None:
    group = _add_group(verbs, "convert", "between Hugging Face and Megatron checkpoints")
    to_megatron = _add_verb(group, "convert to-megatron", "Hugging Face -> Megatron")
    to_hf = _add_verb(group, "convert to-hf", "Megatron (converted or of a run) -> Hugging Face")
    verify = _add_verb(group, "convert verify", "compare both tensor by tensor")

    for parser in (to_megatron, verify):
        parser.add_argument("--hf", required=True, metavar="DIR_OR_HUB_ID", help="folder or hub id")
    for parser in (to_hf, verify):
        parser.add_argument(
            "--checkpoint",
            required=True,
            type=path_from,
            metavar="CKPT",
            help="checkpoint or run",
        )
        parser.add_argument(
            "--step",
            type=integer_from(0),
            help="step of the run's checkpoint (default: the newest)",
        )
    for parser in (to_megatron, to_hf):
        parser.add_argument(
            "--out",
            required=True,
            type=path_from,
            metavar="DIR",
            help="target; must not exist",
        )
        parser.add_argument(
            "--dtype",
            choices=("fp32", "bf16", "fp16"),
            help="cast the weights (default: as they are)",
        )
        parser.add_argument(
            "--verify",
            action="store_true",
            help="read the result back and compare every bit",
        )
    _add_no_verify(to_hf, "verify_source")

    verify.add_argument(
        "--certificate",
        required=True,
        type=path_from,
        metavar="FILE",
        help="JSON file to write",
    )
    verify.add_argument(
        "--logits", action="store_true", help="also compare logits with transformers"
    )
    for axis in ("tp", "pp", "ep"):
        verify.add_argument(
            f"--{axis}",
            type=integer_from(1),
            default=1,
            help=f"{axis} with --logits (default: 1)",
        )
    verify.add_argument(
        "--logits-dtype",
        dest="dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="default: fp32",
    )
    verify.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="with --logits: run code of the checkpoint",
    )


def _add_checks(verbs: _SubParsers) -> None:
    parser = _add_config_verb(verbs, "plan", "estimate memory and time of a run, without a GPU")
    parser.add_argument(
        "--search", action="store_true", help="compare all layouts of the same GPUs"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="compare H100 and H200, with and without recomputation",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="memory, collectives and work of an update from a trace of the program on fake GPUs",
    )
    parser.add_argument(
        "--local-layers",
        action="store_true",
        help="with --trace: Megatron-Core's local layers, where Transformer Engine is missing",
    )
    parser.add_argument(
        "--lengths",
        metavar="RUN",
        help="lengths of the samples of a run's folder, or given ones: "
        "MEAN_PROMPT:SHORTEST,...,LONGEST with evenly spaced quantiles of responses",
    )

    parser = _add_config_verb(
        verbs, "preflight", "check a run before submission, or inside its job"
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="print JSON")
    parser.add_argument(
        "--cluster",
        type=cluster_file,
        help="also check this file, or a name in configs/clusters/",
    )
    parser.add_argument(
        "--skip-servers",
        dest="start_servers",
        action="store_false",
        help="start no SGLang server",
    )

    parser = _add_config_verb(
        verbs, "certify", "compare a tiny run of this configuration with a reference"
    )
    parser.add_argument(
        "--out",
        type=path_from,
        help="folder of the certificate; default: <run folder>/certificate",
    )


def _add_jobs(verbs: _SubParsers) -> None:
    _add_config_verb(verbs, "fetch", "download model, tokenizer and data for jobs")

    parser = _add_config_verb(verbs, "submit", "submit a run or a sweep to Slurm")
    parser.add_argument(
        "--cluster",
        type=cluster_file,
        required=True,
        help="a file, or a name in configs/clusters/",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only print batch scripts and resolved configurations",
    )
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="key=a,b,c",
        help="one run per value",
    )
    parser.add_argument(
        "--seeds",
        type=integer_from(1),
        default=1,
        help="number of runs: run.seed, run.seed + 1, ...",
    )
    parser.add_argument(
        "--convert",
        action="store_true",
        help="first convert the model to Megatron, in another job",
    )
    parser.add_argument(
        "--evaluate",
        action="store_true",
        help="then evaluate the exported model, in another job",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="also submit a run that does not fit on a GPU according to `plan`",
    )

    _add_run_verb(verbs, "status", "attempts, jobs, checkpoint and last metrics of a run")

    parser = _add_run_verb(verbs, "logs", "print the end of a run's log")
    parser.add_argument(
        "--attempt",
        type=integer_from(1),
        help="number of the attempt; default: the latest",
    )
    parser.add_argument(
        "--lines",
        dest="num_lines",
        type=integer_from(1),
        default=40,
        help="number (default: 40)",
    )
    parser.add_argument("--follow", action="store_true", help="print new lines as they are written")

    parser = _add_run_verb(verbs, "cancel", "cancel a run's jobs")
    parser.add_argument("--save", action="store_true", help="request a save and stop instead")


def _add_paper(verbs: _SubParsers) -> None:
    parser = _add_verb(verbs, "paper", "run and print tables and figures of the PACS paper")
    parser.add_argument(
        "overrides",
        nargs="+",
        metavar="TABLE|FIGURE",
        help="or all; and key=value for all runs",
    )
    parser.add_argument(
        "--scale",
        choices=("paper", "v1", "laptop"),
        default="paper",
        help="paper: version 2; v1: version 1; laptop: two cores",
    )
    parser.add_argument(
        "--dir",
        type=path_from,
        help="folder of the runs and tables; default: runs/paper-<scale>",
    )
    parser.add_argument(
        "--seeds",
        type=integer_from(1),
        help="runs of each method; default: 1, or 3 on a laptop",
    )
    parser.add_argument(
        "--cluster",
        type=cluster_file,
        help="submit what is missing to Slurm; default: run here",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only print the nodes of the DAG with their state",
    )
