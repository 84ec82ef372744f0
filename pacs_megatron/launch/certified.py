"""The check of a certificate before a run. `certify` writes the certificate (workbench/certify)."""

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pacs_megatron.config import LoadedConfig
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.json_reader import read_object
from pacs_megatron.runtime.run_folder import run_folder

CERTIFICATE_FILE = "certificate.json"
_COVERED = ("model", "precision", "policy", "objective", "batch", "optimizer")
_PACKAGES = ("pacs-megatron", "torch", "megatron-core", "transformers", "numpy")


def certificate_folder(loaded: LoadedConfig) -> Path:
    """`<run folder>/certificate`."""
    return run_folder(loaded) / "certificate"


def digest_of(config: RunConfig) -> str:
    """SHA-256 of the keys that a certificate covers.

    These are all but names, timeouts, data, servers and outputs.
    """
    tree = config.model_dump(mode="json")
    covered: dict[str, Any] = {name: tree[name] for name in _COVERED}
    parallel = tree["parallel"]
    covered["parallel"] = {key: parallel[key] for key in parallel if not key.endswith("_s")}
    covered["ranks"] = [
        tree["resources"]["nodes"],
        tree["resources"]["gpus_per_node"],
        tree["run"]["nproc"],
    ]
    covered["samples"] = [
        config.rollout.is_sampled,
        config.rollout.sampling.temperature,
        config.mismatch.threshold,
    ]
    if config.rollout.agents is not None:
        covered["samples"].append("several turns")
    text = json.dumps(covered, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def package_versions() -> Mapping[str, str]:
    """Versions of the packages that a certificate records."""
    return {name: version(name) for name in _PACKAGES}


def certificate_line(loaded: LoadedConfig) -> str | None:
    """A line for `train` about the certificate in the run's folder; None without a certificate.

    Raises:
        ConfigError: the certificate is for another configuration, red, or not valid JSON.
    """
    file = certificate_folder(loaded) / CERTIFICATE_FILE
    digest = digest_of(loaded.config)
    if not file.exists():
        return None

    fix = f"run `pacs-megatron certify {loaded.path}` again, or remove {file.parent}"
    content = read_object(file, error=ConfigError)
    recorded = str(content.get("digest"))
    if recorded != digest:
        raise ConfigError(
            f"{file} is of another configuration (digest {recorded:.12}, this one: {digest:.12}); "
            f"{fix}"
        )
    if content["result"] != "green":
        raise ConfigError(f"{file} is {content['result']}: {content['first_deviation']}; {fix}")

    line = f"{file} fits this configuration"
    recorded_versions = content["versions"]
    changed = [
        name
        for name, installed in package_versions().items()
        if recorded_versions.get(name) != installed
    ]
    if changed:
        line += f", but not the version of {', '.join(changed)}"
    return line
