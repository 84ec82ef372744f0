"""Tables of the documentation site: each cell has the title of its column, for narrow screens."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = """<p>a</p><table class="docutils align-default">
<thead>
<tr class="row-odd"><th class="head"><p><code>key</code> "a"</p></th>
<th class="head"><p></p></th>
<th class="head"><p>the
meaning</p></th></tr>
</thead>
<tbody>
<tr class="row-even"><td><p>x</p></td>
<td class="text-right"><p>y</p></td>
<td><p></p></td>
</tr>
<tr class="row-odd"><td><p>x</p></td><td><p>y</p></td><td><p>z</p></td></tr>
</tbody>
</table><table class="other"><tr><td>z</td></tr></table>"""


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_tables", DOCS / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_cell_has_the_title_of_its_column(tables: ModuleType) -> None:
    page = tables.with_titles(PAGE)
    assert re.findall('data-title="([^"]*)"', page) == [
        "key &quot;a&quot;",
        "key &quot;a&quot;",
        "the meaning",
    ]
    assert '<td class="text-right"><p>y</p></td>\n<td></td>' in page, "an empty cell has no title"
    assert re.sub(' data-title="[^"]*"', "", page) == PAGE.replace("<td><p></p></td>", "<td></td>")


def test_the_style_sheet_is_part_of_the_site() -> None:
    configuration = (DOCS / "conf.py").read_text(encoding="utf-8")
    assert 'html_css_files = ["site.css"]' in configuration
    assert "data-title" in (DOCS / "site.css").read_text(encoding="utf-8")
