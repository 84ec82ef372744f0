"""Tables of the documentation site that a phone can show: each cell has the title of its column.

Where a screen is narrow, site.css shows a row as a card and writes the title before each cell.
"""

import re

_TABLE = re.compile(r'<table class="docutils.*?</table>', re.DOTALL)
_ROW = re.compile(r"<tr.*?</tr>", re.DOTALL)
_TITLE = re.compile(r"<th[^>]*>(.*?)</th>", re.DOTALL)
_CELL = re.compile(r"<td(?P<more>[^>]*>)(?P<empty><p></p></td>)?")
_TAG = re.compile(r"<[^>]*>")


def with_titles(page: str) -> str:
    """The HTML of a page whose cells have the attribute `data-title`."""
    return _TABLE.sub(lambda match: _labelled(match[0]), page)


def _labelled(table: str) -> str:
    titles = []
    for title in _TITLE.findall(table):
        text = _TAG.sub("", title).replace('"', "&quot;")
        titles.append(" ".join(text.split()))

    def row(match: re.Match[str]) -> str:
        remaining = iter(titles)

        def cell(match: re.Match[str]) -> str:
            title = next(remaining, "")
            if match["empty"]:
                return "<td></td>"  # the style sheet leaves it out
            label = f' data-title="{title}"' if title else ""
            return f"<td{label}{match['more']}"

        return _CELL.sub(cell, match[0])

    return _ROW.sub(row, table)
