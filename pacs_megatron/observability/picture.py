"""Charts as one SVG file, which needs no style sheet: for a README or a model card."""

import re
from collections.abc import Sequence
from html import escape

from pacs_megatron.observability.charts import HEIGHT, LEFT, WIDTH, Chart, line_chart

_TITLE_HEIGHT = 24
_LEGEND_HEIGHT = 22
_LEGEND_WIDTH = 90
# The colours work on white and on dark.
_COLOURS = ("#2f74e0", "#d9660d", "#12876a", "#b83a8c", "#7a5bd6", "#8a7a1f")
_STYLE = """
text{font:11px system-ui,sans-serif;fill:#7a8494}
.title{font-size:13px;font-weight:600}
.y{text-anchor:end}
.x,.axis{text-anchor:middle}
.grid{stroke:#8b95a5;stroke-opacity:.25}
.cursor{display:none}
.curve{fill:none;stroke-width:1.8}
.faint{opacity:.28;stroke-width:1}
.band{opacity:.15}
.area{opacity:.85}
"""


def picture(charts: Sequence[Chart]) -> str:
    """The charts side by side as an SVG document, over one legend if they have several series.

    The series of all charts have the same names.
    """
    panels = []
    for number, chart in enumerate(charts):
        panels.append(f'<g transform="translate({number * WIDTH} 0)">{_panel(chart)}</g>')

    names = [series.name for series in charts[0].series]
    top = _TITLE_HEIGHT + HEIGHT
    legend = []
    for number, name in enumerate(names if len(names) > 1 else ()):
        left = LEFT + _LEGEND_WIDTH * number
        legend.append(
            f'<g transform="translate({left} {top})"><rect class="dot s{number}" width="10" '
            f'height="10" rx="3"/><text x="15" y="9">{escape(name)}</text></g>'
        )
    colours = "".join(
        f".curve.s{number}{{stroke:{colour}}}.s{number}:not(.curve){{fill:{colour}}}"
        for number, colour in enumerate(_COLOURS)
    )
    height = top + (_LEGEND_HEIGHT if legend else 0)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(charts)} {height}">'
        f"<style>{_STYLE}{colours}</style>{''.join(panels)}{''.join(legend)}</svg>\n"
    )


def _panel(chart: Chart) -> str:
    """A chart with its title, as the inside of an <svg>."""
    drawing = re.search(r"<svg[^>]*>(.*)</svg>", line_chart(chart), re.DOTALL)
    assert drawing is not None
    return (
        f'<text class="title" x="{LEFT}" y="14">{escape(chart.title)}</text>'
        f'<g transform="translate(0 {_TITLE_HEIGHT})">{drawing[1]}</g>'
    )
