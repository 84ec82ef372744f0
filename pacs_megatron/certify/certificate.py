"""The certificate of a configuration: JSON and a page, the digest of what it covers, and the check before a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pacs_megatron.certify.compare import Comparison
from pacs_megatron.certify.shrink import Case
from pacs_megatron.config import LoadedConfig
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.errors import ConfigError, DataError
from pacs_megatron.observability.page import page, safe_text
from pacs_megatron.runtime.files import write_atomically
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.run_folder import run_folder

FILE = "certificate.json"
_VERSIONS_OF = ("pacs-megatron", "torch", "megatron-core", "transformers", "numpy")
_COVERED = ("model", "precision", "policy", "objective", "batch", "optimizer")
NOT_CERTIFIED = (
    "speed, memory and the behaviour at full size",
    "rollouts, rewards, admission, evaluation and weight sync: the samples are recorded",
)


def certificate_folder(loaded: LoadedConfig) -> Path:
    """`<run folder>/certificate`."""
    return run_folder(loaded) / "certificate"


def digest_of(config: RunConfig) -> str:
    """SHA-256 of the keys that a certificate covers; not of names, timeouts, data, servers and outputs."""
    tree = config.model_dump(mode="json")
    covered: dict[str, Any] = {name: tree[name] for name in _COVERED}
    covered["parallel"] = {key: value for key, value in tree["parallel"].items() if not key.endswith("_s")}
    covered["ranks"] = [tree["resources"]["nodes"], tree["resources"]["gpus_per_node"], tree["run"]["nproc"]]
    covered["samples"] = [config.rollout.is_sampled, config.rollout.sampling.temperature, config.mismatch.threshold]
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """One result. Green if nothing deviates."""

    folder: Path
    content: dict[str, Any]

    @classmethod
    def of(
        cls, loaded: LoadedConfig, case: Case, found: Comparison, folder: Path, *, seconds: float, on_gpu: bool
    ) -> Certificate:
        """The certificate of a comparison."""
        wanted, done = loaded.config.precision, case.config.precision
        precision = f"{done.dtype}{' with FP8' if done.fp8 else ''} on {'GPUs' if on_gpu else 'CPU'}"
        not_certified = list(NOT_CERTIFIED)
        if wanted != done:
            own = f"{wanted.dtype}{f' with FP8 ({wanted.fp8.recipe})' if wanted.fp8 else ''}"
            not_certified.insert(
                0, f"{own}, the run's own precision: {precision} was compared; use slurm/certify.sbatch"
            )
        if not on_gpu:
            not_certified.append(
                "Transformer Engine, NCCL and fused kernels: this host ran Megatron's local layers over gloo"
            )
        content = {
            "result": "red" if found.first else "green",
            "first_deviation": found.first,
            "digest": digest_of(loaded.config),
            "configuration": str(loaded.path),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "versions": _versions(),
            "precision": precision,
            "changes": list(case.changes),
            "not_certified": not_certified,
            "metrics_not_compared": sorted(found.not_compared),
            "quantities": [asdict(q) | {"largest": _finite(q.largest)} for q in found.quantities.values()],
        }
        return cls(folder=folder, content=content)

    @property
    def is_green(self) -> bool:
        return bool(self.content["result"] == "green")

    def line(self) -> str:
        """The result in one line."""
        c = self.content
        if self.is_green:
            total = sum(q["compared"] for q in c["quantities"])
            return f"certified ({c['precision']}): {total} numbers agree with the reference in {c['seconds']} s; {self.folder}"
        return f"NOT certified: {c['first_deviation']}; {self.folder}"

    def write(self) -> None:
        """`certificate.json` and `certificate.html`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / "certificate.html", [self.html().encode()])
        write_atomically(self.folder / FILE, [json.dumps(self.content, indent=1).encode(), b"\n"])

    def html(self) -> str:
        """The page, in one file without network."""
        c = self.content
        verdict = "right" if self.is_green else "wrong"
        rows = "".join(
            f"<h3>{safe_text(q['name'])}</h3><p>largest deviation {_number(q['largest'])} {safe_text(q['unit'])}, tolerance "
            f"{_number(q['tolerance'])}, {q['compared']} numbers<br><span class=soft>{safe_text(q['where'])}</span></p>"
            for q in c["quantities"]
        )
        facts = {"configuration": c["configuration"], "digest": c["digest"], "created": c["created"]} | c["versions"]
        facts |= {"precision": c["precision"], "seconds": c["seconds"]}
        listed = "".join(f"<dt>{safe_text(k)}</dt><dd>{safe_text(str(v))}</dd>" for k, v in facts.items())
        body = (
            f"<main><h1>Certificate</h1><p class='verdict {verdict}'>{c['result']}</p>"
            f"<p>{safe_text(c['first_deviation'])}</p><div class=card><dl>{listed}</dl></div>"
            f"<h2>Compared with the reference</h2><div class='card sample'>{rows}</div>"
            + _items("Differences between the run and the case", c["changes"])
            + _items("Not certified", c["not_certified"])
            + _items("Metrics that the reference does not compute", c["metrics_not_compared"])
            + "</main>"
        )
        return page("Certificate", body)


def certificate_line(loaded: LoadedConfig) -> str | None:
    """A line for `train` on the certificate in the run's folder; None where there is none.

    Raises ConfigError if it is of another configuration, red or not readable.
    """
    file = certificate_folder(loaded) / FILE
    if not file.exists():
        return None
    fix = f"run `pacs-megatron certify {loaded.path}` again, or remove {file.parent}"
    try:
        content = read_object(file)
        digest, result, created = (str(content[key]) for key in ("digest", "result", "created"))
        versions = dict(content.get("versions", {}))
    except (DataError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{file} is not a certificate; {fix}") from None
    if digest != digest_of(loaded.config):
        raise ConfigError(
            f"{file} certifies another configuration (digest {digest[:12]}, this one has "
            f"{digest_of(loaded.config)[:12]}); {fix}"
        )
    if result != "green":
        raise ConfigError(f"{file} is {result}: {content.get('first_deviation')}; {fix}")
    other = [name for name, found in _versions().items() if versions.get(name) != found]
    return f"certificate of {created} fits this configuration" + (
        f", but not the version of {', '.join(other)}" if other else ""
    )


def _items(title: str, lines: Sequence[str]) -> str:
    listed = "".join(f"<li>{safe_text(line)}</li>" for line in lines)
    return f"<h2>{title}</h2><div class=card><ul>{listed or '<li>none</li>'}</ul></div>"


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS_OF:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


def _number(value: float | None) -> str:
    return "not a number, or another shape" if value is None else f"{value:.3g}"
