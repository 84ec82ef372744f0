"""The documentation site.

`make docs` builds it from the Markdown files as they are read in the repository.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import reference  # noqa: E402
import tables  # noqa: E402

project = "pacs-megatron"
extensions = ["myst_parser"]
# The source folder is the repository, so that links between documents work on the site and in the
# repository alike.
include_patterns = ["*.md", "docs/**.md", "conversion/*.md", "examples/*.md", "slurm/*.md"]
root_doc = "docs/README"
html_theme = "furo"
html_title = project
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
myst_heading_anchors = 4
nitpicky = True

_CONTENTS = {
    "Start": [
        "Overview <../README>",
        "own-task",
        "architecture",
        "tour",
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
    "Background": [
        "families",
        "compatibility",
        "experiments",
        "releases",
        "../CONTRIBUTING",
        "../CHANGELOG",
    ],
}


def add_generated_text(_app: Sphinx, document: str, content: list[str]) -> None:
    """The table of contents and the configuration reference exist on the site only.

    Measurements are not in the table of contents: the overview and the pages that use them link
    them.
    """
    if document.startswith("docs/measurements/"):
        content[0] = "---\norphan: true\n---\n\n" + content[0]
    if document == "docs/reference":
        content[0] += reference.markdown()
    if document == root_doc:
        for title, pages in _contents().items():
            lines = ["", "```{toctree}", f":caption: {title}", ":hidden:", "", *pages, "```", ""]
            content[0] += "\n".join(lines)


def _contents() -> dict[str, list[str]]:
    """Title -> pages of the table of contents, with all files of docs/ but the measurements."""
    contents = dict(_CONTENTS)
    contents["Decisions"] = _page_names(HERE.glob("decisions/*.md"))

    listed = {"README"}
    for pages in _CONTENTS.values():
        listed.update(Path(page).name for page in pages)
    others = [path for path in HERE.glob("*.md") if path.stem not in listed]
    contents["Others"] = _page_names(others)
    return contents


def _page_names(paths: Iterable[Path]) -> list[str]:
    return [str(path.relative_to(HERE)) for path in sorted(paths)]


def add_titles(
    _app: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: object
) -> None:
    """The cells of tables have the titles of their columns, for narrow screens."""
    if "body" in context:
        context["body"] = tables.with_titles(context["body"])


def write_index(app: Sphinx, failure: Exception | None) -> None:
    """The address of the site's folder shows the overview."""
    if failure is None:
        text = '<!doctype html><meta http-equiv="refresh" content="0; url=README.html">\n'
        Path(app.outdir, "index.html").write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", add_generated_text)
    app.connect("html-page-context", add_titles)
    app.connect("build-finished", write_index)
    return {"parallel_read_safe": True}
