"""The certificate of a configuration, as JSON and as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pacs_megatron.config import LoadedConfig
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.launch.certified import CERTIFICATE_FILE, digest_of, package_versions
from pacs_megatron.observability.page import page, safe_text
from pacs_megatron.runtime.files import write_outputs
from pacs_megatron.workbench.certify.compare import Deviations, Quantity
from pacs_megatron.workbench.certify.shrink import Case


@dataclass(frozen=True, slots=True)
class Certificate:
    """One result, in `folder`. Green if nothing deviates."""

    folder: Path
    content: dict[str, Any]
    """of certificate.json"""

    @classmethod
    def of(
        cls,
        loaded: LoadedConfig,
        case: Case,
        deviations: Deviations,
        folder: Path,
        *,
        seconds: float,
        on_gpu: bool,
    ) -> Certificate:
        """The certificate of a comparison.

        Args:
            loaded: the user's configuration.
            case: its tiny case.
            deviations: of the case's run from the reference.
            folder: where `write` puts it.
            seconds: wall-clock time of all processes.
            on_gpu: whether the case ran on GPUs.
        """
        precision = f"{_precision(case.config)} on {'GPUs' if on_gpu else 'CPU'}"
        content = {
            "result": "red" if deviations.first else "green",
            "first_deviation": deviations.first,
            "configuration": str(loaded.path),
            "digest": digest_of(loaded.config),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "precision": precision,
            "versions": package_versions(),
            "changes": list(case.changes),
            "not_certified": _not_certified(loaded.config, case.config, precision, on_gpu=on_gpu),
            "metrics_not_compared": sorted(deviations.not_compared),
            "quantities": [_quantity(quantity) for quantity in deviations.quantities.values()],
        }
        return cls(folder, content)

    @property
    def is_green(self) -> bool:
        return bool(self.content["result"] == "green")

    def line(self) -> str:
        """The result in one line."""
        content = self.content
        if not self.is_green:
            return f"NOT certified: {content['first_deviation']}; {self.folder}"

        total = sum(quantity["compared"] for quantity in content["quantities"])
        return (
            f"certified ({content['precision']}): {total} numbers equal the reference, "
            f"{content['seconds']} s; {self.folder}"
        )

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
        content = self.content
        title = f"Certificate: {content['result']}"
        colour = "right" if self.is_green else "wrong"
        facts = {
            key: value for key, value in content.items() if isinstance(value, str | float) and value
        }
        rows = "".join(
            f"<dt>{safe_text(key)}</dt><dd>{safe_text(str(value))}</dd>"
            for key, value in (facts | content["versions"]).items()
        )
        body = (
            f"<main><h1 class={colour}>{title}</h1><div class=card><dl>{rows}</dl></div>"
            + _card("Compared with the reference", map(_line_of, content["quantities"]))
            + _card("Differences between the run and the case", content["changes"])
            + _card("Not certified", content["not_certified"])
            + _card("Metrics that the reference does not compute", content["metrics_not_compared"])
        )
        return page(title, f"{body}</main>")


def _card(heading: str, lines: Iterable[str]) -> str:
    """A list under a heading; an empty one has the item "none"."""
    items = "".join(f"<li>{safe_text(line)}</li>" for line in list(lines) or ["none"])
    return f"<h2>{heading}</h2><div class=card><ul>{items}</ul></div>"


def _line_of(quantity: dict[str, Any]) -> str:
    where = f" ({quantity['where']})" if quantity["where"] else ""
    return (
        f"{quantity['name']}: largest deviation {quantity['largest']} {quantity['unit']}, "
        f"tolerance {quantity['tolerance']:g}, {quantity['compared']} numbers{where}"
    )


def _quantity(quantity: Quantity) -> dict[str, Any]:
    """The JSON of a quantity; JSON has no infinity."""
    values = asdict(quantity)
    if not math.isfinite(quantity.largest):
        values["largest"] = "not a number, or another shape"
    return values


def _not_certified(
    config: RunConfig, compared: RunConfig, precision: str, *, on_gpu: bool
) -> list[str]:
    """Lines about everything that the certificate does not cover.

    Args:
        config: of the run.
        compared: of the case.
        precision: of the case, for the text.
        on_gpu: whether the case ran on GPUs.
    """
    lines = []
    own_precision = _precision(config)
    if own_precision != _precision(compared):
        lines.append(
            f"{own_precision}, the run's own precision: {precision} was compared; use "
            "slurm/certify.sbatch"
        )
    lines.append("speed, memory and the behaviour at full size")
    lines.append(
        "rollouts, rewards, admission, evaluation and weight sync: the samples are recorded"
    )
    if not on_gpu:
        lines.append(
            "Transformer Engine, NCCL and fused kernels: the CPU has Megatron's local layers and "
            "gloo"
        )
    return lines


def _precision(config: RunConfig) -> str:
    fp8 = config.precision.fp8
    if fp8 is None:
        return config.precision.dtype
    return f"{config.precision.dtype} with FP8 ({fp8.recipe})"
