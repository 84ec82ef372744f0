"""The frame of `report.html`: style sheet, hover script, and escaping of text."""

import base64
import hashlib
import re
from html import escape

NUM_COLOURS = 8
"""Colours of series, the style classes s0, s1, ..."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def safe_text(text: str) -> str:
    """Returns `text` escaped for HTML; control characters, direction overrides and lone surrogates
    become their code.
    """
    with_line_feeds = text.replace("\r\n", "\n")
    return escape(_CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", with_line_feeds))


def page(title: str, body: str) -> str:
    """Returns the whole document.

    Its security policy forbids the network and all scripts except the hover script.
    """
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; img-src data:"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{safe_text(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{body}<script>{_SCRIPT}</script></body></html>\n"
    )


# Series colours differ in lightness too, for readers who cannot distinguish hues.
_STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1b1f27;--soft:#5b6472;--line:#e3e6eb;
--good:#0b7a4b;--bad:#b3261e;--code:#f3f4f7;
--s0:#2563c9;--s1:#d9660d;--s2:#12876a;--s3:#b0378a;
--s4:#6f56d9;--s5:#8a7a00;--s6:#0c8ba6;--s7:#8b95a5}
@media(prefers-color-scheme:dark){
:root{--bg:#14171c;--card:#1c2027;--ink:#e7eaf0;--soft:#9aa4b4;--line:#2d333d;
--good:#4fd199;--bad:#ff8a80;--code:#14171c;
--s0:#6ea5ff;--s1:#ffa45c;--s2:#4cc9a2;--s3:#f08acb;
--s4:#b3a1ff;--s5:#d6c84a;--s6:#5cc8e0;--s7:#7d8798}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1320px;margin:0 auto;padding:20px clamp(12px,3vw,28px) 48px}
.full{max-width:2400px}
.full .charts{grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr))}
.sections{display:flex;flex-wrap:wrap;gap:0 12px}
.sections section{min-width:0}
.tables{display:flex;flex-wrap:wrap;gap:0 12px}
.tables section{flex:1 1 auto;min-width:0;max-width:100%}
h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}
h2{font-size:1.05rem;margin:32px 0 10px}
p{margin:.3em 0}
.soft{color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));
gap:10px;margin:18px 0 0}
.tiles div,.card,figure{background:var(--card);border:1px solid var(--line);border-radius:10px}
.tiles div{padding:10px 14px}
.tiles span{display:block;color:var(--soft);font-size:.8rem;overflow-wrap:anywhere}
.tiles b{font-size:1.25rem;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.card{padding:6px 14px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;margin:8px 0}
dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,380px),1fr));gap:12px}
figure{margin:0;padding:10px 12px 8px;position:relative;min-width:0}
figcaption{display:flex;justify-content:space-between;gap:10px;
font-weight:600;font-size:.92rem;margin-bottom:4px}
figcaption small{color:var(--soft);font-weight:400}
figcaption code{display:block;color:var(--soft);font-weight:400;font-size:.75rem;
overflow-wrap:anywhere}
figcaption output{font-variant-numeric:tabular-nums}
svg{display:block;width:100%;height:auto;touch-action:pan-y}
svg text{font:11px system-ui,sans-serif;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .y{text-anchor:end}
svg .x{text-anchor:middle}
.grid{stroke:var(--line)}
.cursor{stroke:var(--soft);visibility:hidden}
.curve{fill:none;stroke-width:1.8;stroke-linejoin:round}
.faint{opacity:.28;stroke-width:1}
.band{opacity:.16}
.area{opacity:.72}
.tip{position:absolute;pointer-events:none;background:var(--ink);color:var(--card);
padding:4px 9px;border-radius:6px;font-size:.78rem;line-height:1.4;white-space:pre;
z-index:1;font-variant-numeric:tabular-nums}
figure ul{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;
margin:4px 0 0;padding:0;font-size:.82rem}
figure ul i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:5px}
figure ul b{font-weight:600;font-variant-numeric:tabular-nums}
summary{cursor:pointer;padding:4px 0}
summary h2{display:inline-block;margin:28px 0 6px}
details>.charts{margin-top:10px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem}
th,td{text-align:left;padding:3px 16px 3px 0;border-bottom:1px solid var(--line);
white-space:nowrap}
th{color:var(--soft);font-weight:600}
@media(max-width:600px){table{font-size:.8rem}
th,td{padding:3px 10px 3px 0;white-space:normal;overflow-wrap:break-word}}
.sample{margin-bottom:10px}
.environment pre{border-left:4px solid var(--soft);padding-left:8px}
.sample summary{display:flex;gap:4px 12px;flex-wrap:wrap;align-items:baseline}
.sample summary::before{content:"\\25B8";color:var(--soft)}
.sample[open] summary::before{content:"\\25BE"}
.sample .id{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:.85rem;
overflow-wrap:anywhere}
.verdict{font-weight:600}
.right{color:var(--good)}
.wrong{color:var(--bad)}
.sample h3{font-size:.8rem;font-weight:600;color:var(--soft);margin:8px 0 2px}
pre{margin:0 0 8px;padding:8px 10px;background:var(--code);
border:1px solid var(--line);border-radius:6px;
font:13px/1.45 ui-monospace,Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere;
max-height:24em;overflow:auto;unicode-bidi:isolate}
"""
_STYLE += "".join(
    f".curve.s{n}{{stroke:var(--s{n})}}"
    f".dot.s{n},.band.s{n},.area.s{n}{{fill:var(--s{n})}}"
    f"ul i.s{n}{{background:var(--s{n})}}"
    for n in range(NUM_COLOURS)
)

_SCRIPT = """
for (const figure of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg");
  const cursor = figure.querySelector(".cursor");
  const width = svg.viewBox.baseVal.width;
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  figure.append(tip);

  const nearest = (points, step) => points.reduce((best, point) =>
    Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best);
  const text = (series, point, step) => {
    const suffix = point[0] === step ? "" : " (" + data.x + " " + point[0] + ")";
    return "\\n" + series.name + "  " + point[1] + suffix;
  };

  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * width;
    const span = data.right - data.left;
    const share = span > 0 ? Math.min(1, Math.max(0, (x - data.left) / span)) : 0;
    const pointed = data.first + share * (data.last - data.first);
    const points = data.series.map(series => nearest(series.points, pointed));
    const step = points.map(point => point[0]).reduce((a, b) => Math.max(a, b));
    const lines = data.series.map((series, i) => text(series, points[i], step));
    tip.textContent = data.x + " " + step + lines.join("");
    tip.hidden = false;

    const cursorX = span > 0 && data.last > data.first
      ? data.left + span * (step - data.first) / (data.last - data.first) : data.left;
    cursor.setAttribute("x1", cursorX);
    cursor.setAttribute("x2", cursorX);
    cursor.style.visibility = "visible";

    const space = figure.clientWidth - tip.offsetWidth - 6;
    const frame = figure.getBoundingClientRect();
    const place = event.clientX - frame.left + 14;
    tip.style.left = Math.max(4, place > space ? place - tip.offsetWidth - 28 : place) + "px";
    tip.style.top = box.top - frame.top + 6 + "px";
  });
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    cursor.style.visibility = "hidden";
  });
}
"""
