"""A page in a real headless browser, if this host has one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


def open_in_browser(page: Path, folder: Path) -> str:
    """The document after its scripts ran; also a screenshot beside the page."""
    assert BROWSER is not None
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--virtual-time-budget=3000",
    ]
    options += [
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1280,1600",
        "--disable-background-networking",
    ]
    subprocess.run(
        [BROWSER, *options, f"--screenshot={page.with_suffix('.png')}", page.as_uri()],
        capture_output=True,
        check=True,
        timeout=300,
    )
    done = subprocess.run(
        [BROWSER, *options, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout
