"""The package that is installed as `apex`: NVIDIA's, without its kernels, or PyPI's namesake."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.environment import apex_kind, check_apex


def make_package(folder: Path, *modules: str) -> None:
    for module in modules:
        path = folder / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise SyntaxError('it must not be imported')\n")


@pytest.mark.parametrize(
    ("modules", "kind"),
    [
        ((), "none"),
        (("apex/__init__", "apex/optimizers/__init__", "amp_C"), "nvidia"),
        (("apex/__init__", "apex/optimizers/__init__"), "no kernels"),
        (("apex/__init__", "apex/lib/apps", "amp_C"), "foreign"),
        (("apex",), "foreign"),
        (("apex/notes",), "none"),
    ],
)
def test_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...], kind: str
) -> None:
    """PyPI's is a package without `optimizers`; a folder `apex` beside the run is no package."""
    make_package(tmp_path, *modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert apex_kind() == kind
    if kind != "foreign":
        check_apex()
        return
    with pytest.raises(ConfigError, match=r"PyPI's web toolkit.*run `pip uninstall apex`$"):
        check_apex()
