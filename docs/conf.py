"""The documentation site:

`make docs` builds it from the Markdown files as they are read in the repository.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import reference  # noqa: E402

project = "pacs-megatron"
extensions = ["myst_parser"]
# The source folder is the repository, so that links between documents work on the site and in the
# repository alike.
include_patterns = ["*.md", "docs/**.md", "conversion/*.md", "examples/*.md", "slurm/*.md"]
root_doc = "docs/README"
html_theme = "furo"
html_title = project
html_show_copyright = False
myst_heading_anchors = 4
nitpicky = True

_CONTENTS = {
    "Start": [
        "Overview <../README>",
        "architecture",
        "objective",
        "configuration",
        "reference",
        "metrics",
    ],
    "Use": [
        "operations",
        "security",
        "../slurm/README",
        "../conversion/README",
        "../examples/README",
    ],
    "Background": ["families", "compatibility", "experiments", "../CONTRIBUTING", "../CHANGELOG"],
}


def add_generated_text(_app: Sphinx, document: str, content: list[str]) -> None:
    """The table of contents and the configuration reference exist on the site only."""
    if document == "docs/reference":
        content[0] += reference.markdown()
    if document == root_doc:
        folders = {
            title: sorted(HERE.glob(f"{title.lower()}/*.md"))
            for title in ("Measurements", "Decisions")
        }
        pages = itertools.chain.from_iterable(_CONTENTS.values())
        listed = {Path(page).name for page in pages} | {"README"}
        folders |= {"Others": sorted(path for path in HERE.glob("*.md") if path.stem not in listed)}
        contents = _CONTENTS | {
            t: [str(path.relative_to(HERE)) for path in found] for t, found in folders.items()
        }
        for title, pages in contents.items():
            content[0] += (
                f"\n```{{toctree}}\n:caption: {title}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
            )


def write_index(app: Sphinx, failure: Exception | None) -> None:
    """The address of the site's folder shows the overview."""
    if failure is None:
        text = '<!doctype html><meta http-equiv="refresh" content="0; url=README.html">\n'
        Path(app.outdir, "index.html").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", add_generated_text)
    app.connect("build-finished", write_index)
    return {"parallel_read_safe": True}
