"""The certificate of a configuration, as JSON and as a page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pacs_megatron.config import LoadedConfig
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.launch.certified import CERTIFICATE_FILE, digest_of, package_versions
from pacs_megatron.observability.page import page, safe_text
from pacs_megatron.runtime.files import write_outputs
from pacs_megatron.workbench.certify.compare import Comparison
from pacs_megatron.workbench.certify.shrink import Case


@dataclass(frozen=True, slots=True)
class Certificate:
    """One result, in `folder`. Green if nothing deviates."""

    folder: Path
    content: dict[str, Any]

    @classmethod
    def of(
        cls,
        loaded: LoadedConfig,
        case: Case,
        found: Comparison,
        folder: Path,
        *,
        seconds: float,
        on_gpu: bool,
    ) -> Certificate:
        """The certificate of a comparison."""
        own = _precision(loaded.config)
        compared = _precision(case.config)
        precision = f"{compared} on {'GPUs' if on_gpu else 'CPU'}"
        not_certified = {
            f"{own}, the run's own precision: {precision} was compared; use slurm/certify.sbatch": own
            != compared,
            "speed, memory and the behaviour at full size": True,
            "rollouts, rewards, admission, evaluation and weight sync: the samples are recorded": True,
            "Transformer Engine, NCCL and fused kernels: the CPU has Megatron's local layers and "
            "gloo": not on_gpu,
        }
        content = {
            "result": "red" if found.first else "green",
            "first_deviation": found.first,
            "configuration": str(loaded.path),
            "digest": digest_of(loaded.config),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "precision": precision,
            "versions": package_versions(),
            "changes": list(case.changes),
            "not_certified": [text for text, applies in not_certified.items() if applies],
            "metrics_not_compared": sorted(found.not_compared),
            "quantities": [
                asdict(q)
                | {
                    "largest": q.largest
                    if q.largest < float("inf")
                    else "not a number, or another shape"
                }
                for q in found.quantities.values()
            ],
        }
        return cls(folder, content)

    @property
    def is_green(self) -> bool:
        return bool(self.content["result"] == "green")

    def line(self) -> str:
        """The result in one line."""
        c = self.content
        if not self.is_green:
            return f"NOT certified: {c['first_deviation']}; {self.folder}"
        total = sum(q["compared"] for q in c["quantities"])
        return f"certified ({c['precision']}): {total} numbers equal the reference, {c['seconds']} s; {self.folder}"

    def write(self) -> None:
        """Writes `certificate.json` and `certificate.html`; does not replace the certificate of an
        export.
        """
        text = json.dumps(self.content, indent=1).encode() + b"\n"
        write_outputs(
            [
                (self.folder / CERTIFICATE_FILE, text),
                (self.folder / "certificate.html", self._page().encode()),
            ]
        )

    def _page(self) -> str:
        c = self.content
        facts = {
            key: value for key, value in c.items() if isinstance(value, str | float) and value
        } | c["versions"]
        quantities = [
            f"{q['name']}: largest deviation {q['largest']} {q['unit']}, tolerance "
            f"{q['tolerance']:g}, {q['compared']} "
            f"numbers{' (' + q['where'] + ')' if q['where'] else ''}"
            for q in c["quantities"]
        ]
        title = f"Certificate: {c['result']}"
        colour = "right" if self.is_green else "wrong"
        rows = "".join(
            f"<dt>{safe_text(key)}</dt><dd>{safe_text(str(value))}</dd>"
            for key, value in facts.items()
        )
        body = f"<main><h1 class={colour}>{title}</h1><div class=card><dl>{rows}</dl></div>"
        for heading, lines in (
            ("Compared with the reference", quantities),
            ("Differences between the run and the case", c["changes"]),
            ("Not certified", c["not_certified"]),
            ("Metrics that the reference does not compute", c["metrics_not_compared"]),
        ):
            items = "".join(f"<li>{safe_text(line)}</li>" for line in lines or ["none"])
            body += f"<h2>{heading}</h2><div class=card><ul>{items}</ul></div>"
        return page(title, f"{body}</main>")


def _precision(config: RunConfig) -> str:
    fp8 = config.precision.fp8
    return config.precision.dtype + (f" with FP8 ({fp8.recipe})" if fp8 else "")
