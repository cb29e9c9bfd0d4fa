"""Open a page in headless Chromium, and say how it looks there: width, requests, and what axe-core finds wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

SCHEMES = {"dark": 0, "light": 1}  # Blink's preferredColorScheme
POLICY = re.compile(r"<meta http-equiv=.Content-Security-Policy.*?>")  # would refuse the script that looks at the page
SCRIPT = """
addEventListener('load', () => axe.run().then(found => {
  const seen = {
    width: innerWidth, content: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType('resource').map(each => each.name),
    background: getComputedStyle(document.body).backgroundColor,
    violations: found.violations.map(each => [each.impact, each.id, each.nodes[0].html.slice(0, 200)]),
  };
  parent.postMessage(seen, '*');
}));
"""
# A window is 500 pixels wide at least, and a frame as wide as a phone.
FRAME = """<!doctype html><title>waiting</title><iframe width="{width}" height="900" style="border:0" src="{page}"></iframe>
<script>onmessage = event => {{ document.title = 'SEEN' + JSON.stringify(event.data) }}</script>"""


@dataclass(frozen=True)
class Seen:
    """width and content in pixels; violations: (impact, rule, the first element)."""

    width: int
    content: int
    requests: list[str]
    background: str
    violations: list[list[str]]


def open_page(page: str, folder: Path, width: int = 1280, scheme: str = "light") -> Seen:
    """Skips the test where there is no Chromium or no axe-core."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("there is no chromium on the PATH (Debian: apt install chromium)")
    if not (axe := find_spec("axe_core_python")) or not axe.submodule_search_locations:
        pytest.skip("there is no axe-core: pip install axe-core-python")
    script = (Path(axe.submodule_search_locations[0]) / "axe.min.js").read_text() + SCRIPT
    watched = folder / f"{scheme}{width}.html"
    watched.write_text(POLICY.sub("", page).replace("</body>", f"<script>{script}</script></body>"))
    frame = folder / f"frame{scheme}{width}.html"
    frame.write_text(FRAME.format(width=width, page=watched.as_uri()))
    done = subprocess.run(
        [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile{scheme}{width}",
         f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--window-size={width + 100},1000",
         "--virtual-time-budget=20000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    match = re.search(r"<title>SEEN(.*?)</title>", done.stdout, re.S)
    assert match, done.stderr[-2000:]
    return Seen(**json.loads(match[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">")))
