"""Strings of run and cluster files are validated by their meaning; a rejection is one line with the
key.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.cluster import load_cluster
from pacs_megatron.errors import ConfigError
from tests.support.run_files import BASE

NO_SERVERS = (
    *(
        "http://host:99999",
        "http://host:port",
        "http://host:0",
        "http://host",
        "https://host:1",
        "http://host:1/v1",
    ),
    *("http://" + "a" * 64 + ":1", "http://..:1", "http://a..b:1"),
    *("http://host:1?key=x", "http://host:1#x", "host:1", "http://:1"),
)
SGLANG = "rollout={engine: sglang, sampling: {max_response_tokens: 8}, sync: {transport: disk}"

WEIGHTED = (
    "reward={{name: weighted, label_threshold: 0.5, components: [{{weight: {}, reward: {{name: "
    "math}}}}, "
    "{{weight: 1, reward: {{name: arithmetic}}}}]}}"
)


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def refusal(path: Path, override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "resources.time_limit=99:99:99",
            "resources.time_limit: expected [days-]hours:minutes:seconds",
        ),
        ("resources.time_limit=1-24:00:00", "resources.time_limit: expected"),
        ('resources.time_limit="04:00:00\\n"', "resources.time_limit: expected"),
        ("model.path=", "model.path: expected text, got an empty string"),
        ('model.path="a\\nb"', "model.path: expected one line, got the control character '\\n'"),
        (
            f"model.path={'a' * 300}",
            "model.path: expected file names of at most 255 bytes, got 300",
        ),
        (f"model.path={'a/' * 3000}", "model.path: expected a path of at most 4095 bytes"),
        (f"run.name={'a' * 300}", "run.name: expected at most 200 bytes, got 300; shorten it"),
        ("run.name=$(touch x)", "run.name: expected letters, digits"),
        ("data.train.name=../../x", "data.train.name: expected letters, digits"),
        (f"run.seed={2**63}", "run.seed="),
        (
            f"{SGLANG}, urls: ['file:///etc/passwd']}}",
            "rollout.urls.0: expected http://<host>:<port>",
        ),
        (
            f"{SGLANG}, urls: ['http://host:99999']}}",
            "rollout.urls.0: expected http://<host>:<port>",
        ),
        (f"{SGLANG}, urls: ['']}}", "rollout.urls.0: expected text"),
        (f"{SGLANG}, urls: ['http://']}}", "rollout.urls.0: expected http://<host>:<port>"),
        (f"{SGLANG}, urls: ['http://a b:1']}}", "rollout.urls.0: expected http://<host>:<port>"),
        (
            f"{SGLANG}, urls: ['http://user:pw@h:1']}}",
            "rollout.urls.0: expected http://<host>:<port> without user or password",
        ),
        *(
            (f"{SGLANG}, urls: ['{url}']}}", "rollout.urls.0: expected http://<host>:<port>")
            for url in NO_SERVERS
        ),
        (
            f"{SGLANG}, urls: ['http://h:1', 'http://H:1/']}}",
            "rollout.urls: http://h:1 is named twice",
        ),
        (
            "reward={name: format, pattern: '('}",
            "reward.pattern: expected a regular expression of Python, got '('",
        ),
        (
            f"reward={{name: format, pattern: '{'(' * 5000 + ')' * 5000}'}}",
            "reward.pattern: expected a regular",
        ),
        (
            "reward={name: format, pattern: 'a{9999999999}'}",
            "reward.pattern: expected a regular expression of Python",
        ),
        (WEIGHTED.format("1e308"), "reward.components.0.weight=1e+308: expected"),
        (
            f"{SGLANG}, urls: ['http://h:1'], api_key_env: 'A=B'}}",
            "rollout.api_key_env: expected the name of an env",
        ),
    ],
)
def test_run_strings(base: Path, override: str, expected: str) -> None:
    assert expected in refusal(base, override)


def test_an_address_with_a_password_is_not_printed(base: Path) -> None:
    assert "hunter2" not in refusal(base, f"{SGLANG}, urls: ['http://me:hunter2@host:1']}}")


@pytest.mark.parametrize(
    "override",
    [
        "resources.time_limit=99:59:59",
        "resources.time_limit=7-00:00:00",
        "run.dir=/data/My runs",
        f"{SGLANG}, urls: ['http://n1:30000', 'http://[::1]:8/']}}",
    ],
)
def test_accepted_run_strings(base: Path, override: str) -> None:
    load_config(base, [override])


@pytest.mark.parametrize(
    "line",
    [
        r'account: "a\n#SBATCH --uid=0"',
        "account: a b",
        "partition: x;y",
        "qos: $(id)",
        "constraint: a;b",
        "mem: 10 G",
        'network_interface: "ib0; id"',
        'scratch: "/a\\nb"',
        'srun_args: ["--a\\nb"]',
        'env: {A: "x\\ny"}',
        "env: {'A=B': c}",
        "cpu_bind: cores;id",
        "modules: [-f]",
        'container: {runtime: pyxis, image: "a\\nb"}',
        "container: {runtime: pyxis, image: a, mounts: [relative]}",
        "container: {runtime: pyxis, image: a, mounts: ['/a,/b']}",
    ],
)
def test_cluster_strings(tmp_path: Path, line: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"name: x\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    assert len(str(caught.value).splitlines()) == 1
    assert line.split(":")[0].strip() in str(caught.value)


def test_binding_to_cores_requires_the_number_of_cores(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("name: x\ncpu_bind: verbose,cores\n")
    with pytest.raises(
        ConfigError, match="cpu_bind=verbose,cores without cpus_per_task binds a rank"
    ):
        load_cluster(path)
    path.write_text("name: x\ncpu_bind: map_ldom:0,1\n")
    assert load_cluster(path).cpu_bind == "map_ldom:0,1"


def test_the_home_folder_in_paths_of_a_run(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words = ["run.dir=~/runs", "model.path=~/model", "data.train.path=~/d.jsonl"]
    config = load_config(base, [*words, "data.train.more_paths=[~/e.jsonl]"]).config
    assert (config.run.dir, config.model.path) == ("/home/me/runs", "/home/me/model")
    assert config.data.train.paths == ("/home/me/d.jsonl", "/home/me/e.jsonl")
    servers = "{count: 1, device: cpu, python: [~/v/bin/python]}"
    rollout = f"{SGLANG.replace('disk', 'disk, folder: ~/w')}, servers: {servers}}}"
    managed = load_config(base, [rollout]).config.rollout
    assert managed.servers.python == ("/home/me/v/bin/python",)  # type: ignore[union-attr]
    assert managed.sync.folder == "/home/me/w"  # type: ignore[union-attr]


def test_the_home_folder_in_includes(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(base.parent))
    (base.parent / "more.yaml").write_text("include: ~/base.yaml\nrun: {name: more}\n")
    assert load_config(base.parent / "more.yaml").config.run.name == "more"


def test_the_home_folder_in_a_cluster_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "name: c\npython: [~/venv/bin/python, -u]\nscratch: ~/tmp\n"
        "container: {runtime: apptainer, image: ~/x.sif}\nenv: {HF_HOME: ~/hf, A: a~/b}\n"
    )
    cluster = load_cluster(file)
    assert cluster.python == ("/home/me/venv/bin/python", "-u")
    assert cluster.scratch == "/home/me/tmp"
    assert cluster.container is not None and cluster.container.image == "/home/me/x.sif"
    assert cluster.env == {"HF_HOME": "/home/me/hf", "A": "a~/b"}
