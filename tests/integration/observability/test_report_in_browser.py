"""report.html with hostile texts in a real browser: nothing executes, nothing is fetched.

Needs Chromium or Chrome.
"""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pacs_megatron.observability.metrics import MetricsWriter
from pacs_megatron.observability.report import write_report
from pacs_megatron.runtime.run_folder import write_environment
from tests.support.browser import BROWSER, open_in_browser
from tests.support.reports import step_row, write_samples

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed"),
]


@pytest.fixture
def canary() -> Iterator[tuple[str, list[str]]]:
    """URL of a server, and the paths that were requested from it."""
    requested: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requested
    server.shutdown()


def hostile(url: str) -> str:
    """Every usual way out of HTML text, attributes, scripts, styles and SVG; each one would request
    a path of its own.
    """

    def script(name: str) -> str:
        return f"document.title='fired';new Image().src='{url}/{name}'"

    return "\n".join(
        [
            f"<script>{script('script')}</script>",
            f"</script><script>{script('end-of-script')}</script>",
            f"</pre></details></style></title></svg><script>{script('end-of-pre')}</script>",
            f'"><img src=x onerror="{script("onerror")}">',
            f'\'><svg onload="{script("onload")}"></svg>',
            f'<img src="{url}/image"><link rel=stylesheet href="{url}/style"><iframe '
            f'src="{url}/frame"></iframe>',
            f'<style>@import "{url}/import"; body{{background:url({url}/background)}}</style>',
            f'<meta http-equiv=refresh content="0;url={url}/refresh"><base href="{url}/">',
            f'<a href="javascript:{script("link")}" autofocus onfocus="{script("focus")}">x</a>',
            f'<details open ontoggle="{script("toggle")}"><summary>x</summary></details>',
            f"<!-- --!><script>{script('comment')}</script> ${{alert(1)}} "
            "{{7*7}} \\u003cscript\\u003e",
        ]
    )


def title_of(document: str) -> str:
    found = re.search(r"<title>(.*?)</title>", document, flags=re.S)
    assert found is not None
    return found[1]


def hostile_report(folder: Path, text: str) -> Path:
    run_dir = folder / "run<img src=x onerror=document.title=`fired`>"
    run_dir.mkdir()
    for step in (1, 2):
        write_samples(run_dir, step, text)
    (run_dir / "config.yaml").write_text(
        "model: {path: '</pre><script>document.title=`fired`</script>'}\n"
    )
    write_environment(run_dir, {"device": text})
    with MetricsWriter(run_dir) as writer:
        for step in (1, 2):
            writer.append(
                {
                    **step_row(step),
                    "eval/</script><script>document.title=`fired`</script>/pass@1": 0.5,
                }
            )
    return write_report(run_dir, num_samples=8)


def test_nothing_of_a_hostile_run_executes_or_is_fetched(
    tmp_path: Path, canary: tuple[str, list[str]]
) -> None:
    url, requested = canary
    report = hostile_report(tmp_path, hostile(url))
    document = open_in_browser(report, tmp_path)
    assert title_of(document).startswith("run&lt;img") and requested == []
    assert document.count('<div class="tip"') == document.count("<figure"), (
        "the report's own script has run"
    )
    assert "onerror=" in re.sub(r"<[^>]*>", "", document), "the text is shown"
    assert report.with_suffix(".png").stat().st_size > 20_000


@pytest.mark.parametrize("with_policy", [True, False])
def test_the_policy_stops_what_escaping_would_miss(
    tmp_path: Path, canary: tuple[str, list[str]], with_policy: bool
) -> None:
    """The same texts without escapes: blocked by the page's policy, and seen by this test without
    it.
    """
    url, requested = canary
    html = hostile_report(tmp_path, "text").read_text()
    html = html.replace("<main>", f"<main>{hostile(url).replace('http-equiv=refresh', '')}", 1)
    if not with_policy:
        html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    page = tmp_path / "page.html"
    page.write_text(html)
    title = title_of(open_in_browser(page, tmp_path))
    assert (
        (title != "fired" and requested == [])
        if with_policy
        else (title == "fired" and "/image" in requested)
    )
