"""Uploads an export of a run to the Hugging Face hub, with a model card.

The client of the hub reads the token from HF_TOKEN, or from an earlier `hf auth login`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pacs_megatron.config.text import HUB_ID
from pacs_megatron.config.yaml_tree import read_yaml
from pacs_megatron.errors import ConfigError
from pacs_megatron.launch.certified import CERTIFICATE_FILE
from pacs_megatron.observability.charts import Chart, Series
from pacs_megatron.observability.metric_words import words_of
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.picture import picture
from pacs_megatron.runtime.environment import check_secret
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.run_folder import CONFIG_FILE, METRICS_FILE
from pacs_megatron.runtime.waiting import report_wait

_CARD = "README.md"
_CURVE = "curve.svg"
_PASS_RATE = re.compile(r"eval/(.+)/pass@1")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def check_repository(repository: str) -> None:
    """Raises ConfigError for a name that the hub does not accept, or a token that HTTP does not."""
    check_secret("HF_TOKEN")
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigError(f"--push {repository}: expected OWNER/NAME of the hub; correct it")


def push(folder: Path, repository: str, run_dir: Path, *, is_public: bool) -> str:
    """Uploads an exported folder, then its card, picture, configuration and certificate.

    A second call replaces the files. A README.md of the folder stays the card.

    Args:
        folder: Export in Hugging Face format.
        repository: `owner/name`; created if it does not exist.
        run_dir: Folder of the run, for the card.
        is_public: Whether a new repository is visible to everyone.

    Returns:
        A line with the address.

    Raises:
        ConfigError: The hub rejects the upload, or cannot be reached.
    """
    import httpx
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    files = card_files(run_dir, repository)
    if (folder / _CARD).is_file():
        del files[_CARD]
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]

    api = HfApi()
    try:
        with report_wait(f"for the hub to receive {repository}"):
            api.create_repo(repository, private=not is_public, exist_ok=True)
            api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=f"Weights of {run_dir.name}"
            )
            api.create_commit(repository, operations, commit_message=f"Card of {run_dir.name}")
    except (OSError, httpx.HTTPError, HfHubHTTPError, HFValidationError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"--push {repository}: {api.endpoint} did not take the upload ({reason}); set HF_TOKEN "
            "to a token that may write there, and run the command again; the export is in "
            f"{folder}"
        ) from None
    return f"{api.endpoint}/{repository}"


def card_files(run_dir: Path, repository: str) -> dict[str, bytes]:
    """The files beside the weights by name: card, curve, configuration and certificate.

    The curve and the certificate only if the run has them.
    """
    text = (run_dir / CONFIG_FILE).read_text(encoding="utf-8")
    config: Any = read_yaml(run_dir / CONFIG_FILE, str(run_dir / CONFIG_FILE)).plain()
    rows = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
    charts = _charts(rows)

    files = {CONFIG_FILE: text.encode()}
    certificate = run_dir / "certificate" / CERTIFICATE_FILE
    record = None
    if certificate.is_file():
        record = read_object(certificate)
        files[CERTIFICATE_FILE] = certificate.read_bytes()
    if charts:
        files[_CURVE] = picture(charts).encode()
    card = _card(repository, config, rows, has_curve=bool(charts), certificate=record)
    return {_CARD: card.encode("utf-8", "backslashreplace"), **files}


def _charts(rows: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The reward, and the pass rate of each benchmark, as far as the run has them."""
    charts = []
    for key in ("reward/mean", *_benchmarks(rows)):
        points = [(row["step"], float(row[key])) for row in rows if row.get(key) is not None]
        if points:
            title, unit = words_of(key)
            series = [Series(name=title, points=points)]
            charts.append(Chart(title=title, series=series, note=unit))
    return charts


def _benchmarks(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Metric -> name of the benchmark."""
    found = {}
    for row in rows:
        for key in row:
            match = _PASS_RATE.fullmatch(key)
            if match is not None:
                found[key] = match[1]
    return found


def _card(
    repository: str,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    has_curve: bool,
    certificate: Mapping[str, Any] | None,
) -> str:
    base = str(config["model"]["path"])
    objective = str(config["objective"]["name"])
    head: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pacs-megatron", objective],
    }
    is_hub_id = bool(HUB_ID.fullmatch(base)) and not Path(base).exists()
    if is_hub_id:
        head["base_model"] = base
    name = base if is_hub_id else Path(base).name
    num_steps = rows[-1]["step"] if rows else 0

    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False).strip(),
        "---",
        f"# {repository.partition('/')[2]}",
        "",
        f"`{name}` after {num_steps} steps of `{objective}` with pacs-megatron.",
    ]
    if has_curve:
        lines += ["", f"![Curves of the run]({_CURVE})"]
    lines += _results(rows)
    lines += [
        "",
        "## Configuration",
        f"[{CONFIG_FILE}]({CONFIG_FILE}) has every option of the run.",
    ]
    lines += ["", "## Certificate"]
    if certificate is None:
        lines.append("`pacs-megatron certify` was not run for this configuration.")
    else:
        lines.append(
            f"`pacs-megatron certify` of this configuration: {certificate.get('result')} "
            f"([{CERTIFICATE_FILE}]({CERTIFICATE_FILE}))."
        )
    return "\n".join(lines) + "\n"


def _results(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of the pass rates at the start and at the end; empty without benchmarks."""
    lines = []
    for key, name in _benchmarks(rows).items():
        values = [float(row[key]) for row in rows if row.get(key) is not None]
        if values:
            lines.append(f"| {name} | {values[0]:.3f} | {values[-1]:.3f} |")
    if not lines:
        return []
    return ["", "## Results", "| benchmark | pass@1, start | end |", "|---|---|---|", *lines]
