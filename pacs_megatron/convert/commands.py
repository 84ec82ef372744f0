"""The three commands of `pacs-megatron convert`."""

import argparse
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Literal

from pacs_megatron.errors import ConversionError
from pacs_megatron.runtime.command_line import integer_from

Verb = Literal["to-megatron", "to-hf", "verify"]
NO_VERIFY_HELP = "do not check the digests of the checkpoint's files; the certificate records it"
_DTYPES = ("fp32", "bf16", "fp16")

DESCRIPTIONS: dict[Verb, str] = {
    "to-megatron": "Hugging Face folder -> Megatron checkpoint that loads at any TP x PP x EP",
    "to-hf": "converted or training checkpoint -> Hugging Face folder",
    "verify": "compare both sides tensor by tensor, write a certificate",
}


def add_arguments(verb: Verb, parser: argparse.ArgumentParser) -> None:
    """The arguments of one command."""
    if verb == "to-megatron":
        parser.add_argument("--hf", required=True, metavar="DIR_OR_HUB_ID", help="source: folder or hub id")
    if verb == "to-hf":
        parser.add_argument("--checkpoint", required=True, type=Path, metavar="CKPT", help="source: checkpoint or run")
        parser.add_argument("--step", type=integer_from(0), help="step of the run's checkpoint (default: the newest)")
        parser.add_argument("--no-verify", action="store_true", help=NO_VERIFY_HELP)
    if verb == "verify":
        _add_verify_arguments(parser)
        return
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="target; must not exist")
    parser.add_argument("--dtype", choices=_DTYPES, help="cast the weights (default: keep their dtype)")
    parser.add_argument("--verify", action="store_true", help="read the result back and compare every bit")


def _add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf", required=True, metavar="DIR_OR_HUB_ID", help="folder or hub id")
    parser.add_argument("--checkpoint", required=True, type=Path, metavar="CKPT", help="converted checkpoint or run")
    parser.add_argument("--step", type=integer_from(0), help="step of the run's checkpoint (default: the newest)")
    parser.add_argument("--certificate", required=True, type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument("--logits", action="store_true", help="also compare logits with transformers")
    for axis in ("tp", "pp", "ep"):
        parser.add_argument(
            f"--{axis}", type=integer_from(1), default=1, help=f"{axis} for the logits comparison (default: 1)"
        )
    parser.add_argument(
        "--logits-dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of both models (default: fp32)"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="with --logits: allow transformers to run code from the checkpoint",
    )


def run(verb: Verb, arguments: argparse.Namespace) -> str:
    """Runs one command and returns its summary. Raises PacsError subclasses."""
    previous = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        return _RUN[verb](arguments)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    # `with` blocks then remove partial output, as after Ctrl-C.
    raise SystemExit(128 + signal.SIGTERM)


def _to_megatron(arguments: argparse.Namespace) -> str:
    from pacs_megatron.convert.convert import Options, hf_to_megatron

    options = Options(out=arguments.out, dtype=arguments.dtype, verify=arguments.verify)
    return str(hf_to_megatron(arguments.hf, options))


def _to_hf(arguments: argparse.Namespace) -> str:
    from pacs_megatron.convert.convert import Options, megatron_to_hf

    options = Options(
        out=arguments.out,
        dtype=arguments.dtype,
        verify=arguments.verify,
        verify_source=not arguments.no_verify,
    )
    return str(megatron_to_hf(arguments.checkpoint, options, step=arguments.step))


def _verify(arguments: argparse.Namespace) -> str:
    from pacs_megatron.convert.logits import LogitsOptions
    from pacs_megatron.convert.verify import verify

    logits = None
    if not arguments.logits and (arguments.tp, arguments.pp, arguments.ep) != (1, 1, 1):
        raise ConversionError("--tp, --pp and --ep are the layout of --logits; add --logits or remove them")
    if arguments.logits:
        logits = LogitsOptions(
            tp=arguments.tp,
            pp=arguments.pp,
            ep=arguments.ep,
            dtype=arguments.logits_dtype,
            trust_remote_code=arguments.trust_remote_code,
        )
    return verify(arguments.hf, arguments.checkpoint, arguments.certificate, step=arguments.step, logits=logits)


_RUN: dict[Verb, Callable[[argparse.Namespace], str]] = {
    "to-megatron": _to_megatron,
    "to-hf": _to_hf,
    "verify": _verify,
}
