"""Uploads to a loopback hub, by the hub's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import yaml

from pacs_megatron.errors import ConfigError
from pacs_megatron.launch.push import card_files, check_repository, push
from tests.support import hub as loopback

REPOSITORY = "me/pacs-tiny"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[loopback.Hub]:
    with loopback.serve({}) as served:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", served.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        # The loopback hub has no storage of the kind that hf_xet needs.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
        yield served


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    config = {"model": {"path": "Qwen/Qwen3-0.6B"}, "objective": {"name": "pacs"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = []
    for step in range(3):
        rows.append({"step": step, "reward/mean": step / 4, "eval/aime24/pass@1": step / 10})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return folder


def certify(run_dir: Path) -> None:
    (run_dir / "certificate").mkdir()
    record = {"result": "green", "digest": "abc"}
    (run_dir / "certificate" / "certificate.json").write_text(json.dumps(record))


def test_an_upload_has_weights_card_curve_configuration_and_certificate(
    hub: loopback.Hub, run_dir: Path, export: Path
) -> None:
    certify(run_dir)
    line = push(export, REPOSITORY, run_dir, is_public=False)
    assert line == f"{hub.url}/{REPOSITORY}"
    files = hub.uploads[REPOSITORY]
    names = {"config.json", "model.safetensors", "README.md", "curve.svg", "config.yaml"}
    assert set(files) == names | {"certificate.json"}
    for name in ("config.json", "model.safetensors"):
        assert files[name] == (export / name).read_bytes()
    assert files["config.yaml"] == (run_dir / "config.yaml").read_bytes()
    assert files["curve.svg"].startswith(b"<svg xmlns")
    assert hub.tokens == {"Bearer hf_s3cret"}
    assert [request["visibility"] for request in hub.created] == ["private"]

    push(export, REPOSITORY, run_dir, is_public=True)
    assert hub.created[-1]["visibility"] == "public"


def test_the_card_has_head_results_and_links(run_dir: Path) -> None:
    card = card_files(run_dir, REPOSITORY)["README.md"].decode()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pacs-megatron", "pacs"],
        "base_model": "Qwen/Qwen3-0.6B",
    }
    assert "`Qwen/Qwen3-0.6B` after 2 steps of `pacs`" in body
    assert "| aime24 | 0.000 | 0.200 |" in body
    assert "![Curves of the run](curve.svg)" in body
    assert "`pacs-megatron certify` was not run" in body
    certify(run_dir)
    assert (
        "certify` of this configuration: green" in card_files(run_dir, "a/b")["README.md"].decode()
    )


def test_a_run_without_metrics_has_a_card_and_no_curve(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    config = {"model": {"path": str(run_dir)}, "objective": {"name": "grpo"}}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    files = card_files(run_dir, REPOSITORY)
    assert set(files) == {"README.md", "config.yaml"}
    card = files["README.md"].decode()
    # The path of a machine is not in the card.
    assert "base_model" not in card and str(run_dir) not in card


def test_a_card_of_the_folder_stays(hub: loopback.Hub, run_dir: Path, export: Path) -> None:
    (export / "README.md").write_text("mine")
    push(export, REPOSITORY, run_dir, is_public=False)
    assert hub.uploads[REPOSITORY]["README.md"] == b"mine"


def test_a_hub_that_fails_is_one_line(hub: loopback.Hub, run_dir: Path, export: Path) -> None:
    hub.broken = True
    with pytest.raises(ConfigError, match=r"did not take the upload .*set HF_TOKEN") as caught:
        push(export, REPOSITORY, run_dir, is_public=False)
    assert "\n" not in str(caught.value) and "s3cret" not in str(caught.value)


@pytest.mark.parametrize("name", ["tiny", "a/b/c", "a b/c", ""])
def test_a_name_that_is_no_repository_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"expected OWNER/NAME"):
        check_repository(name)


def test_a_token_with_a_line_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret\n")
    with pytest.raises(ConfigError, match=r"HF_TOKEN contains a line end") as caught:
        check_repository(REPOSITORY)
    assert "s3cret" not in str(caught.value)
