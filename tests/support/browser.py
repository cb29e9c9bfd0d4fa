"""Open pages in headless Chromium, and say how they look there: width, requests, and what axe-core finds wrong."""

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
    index: __INDEX__,
    width: innerWidth, content: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType('resource').map(each => each.name),
    background: getComputedStyle(document.body).backgroundColor,
    violations: found.violations.map(each => [each.impact, each.id, each.nodes[0].html.slice(0, 200)]),
  };
  parent.postMessage(seen, '*');
}));
"""
# A window is 500 pixels wide at least, and a frame as wide as a phone.
FRAME = """<!doctype html><title>waiting</title>{frames}<script>const found = [];
onmessage = event => {{ found.push(event.data); if (found.length == {count}) document.title = 'SEEN' + JSON.stringify(found) }}</script>"""
IFRAME = '<iframe width="{width}" height="900" style="border:0" src="{page}"></iframe>'


@dataclass(frozen=True)
class Seen:
    """width and content in pixels; violations: (impact, rule, the first element)."""

    width: int
    content: int
    requests: list[str]
    background: str
    violations: list[list[str]]


def open_page(page: str, folder: Path, width: int = 1280, scheme: str = "light") -> Seen:
    """As open_pages, of one."""
    return open_pages([page], folder, width, scheme)[0]


def open_pages(pages: list[str], folder: Path, width: int = 1280, scheme: str = "light") -> list[Seen]:
    """By one browser. Skips the test where there is no Chromium or no axe-core."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("there is no chromium on the PATH (Debian: apt install chromium)")
    if not (axe := find_spec("axe_core_python")) or not axe.submodule_search_locations:
        pytest.skip("there is no axe-core: pip install axe-core-python")
    script = (Path(axe.submodule_search_locations[0]) / "axe.min.js").read_text() + SCRIPT
    frames = []
    for index, page in enumerate(pages):
        watched = folder / f"{scheme}{width}_{index}.html"
        own = f"<script>{script.replace('__INDEX__', str(index))}</script></body>"
        watched.write_text(POLICY.sub("", page).replace("</body>", own))
        frames.append(IFRAME.format(width=width, page=watched.as_uri()))
    frame = folder / f"frame{scheme}{width}.html"
    frame.write_text(FRAME.format(frames="".join(frames), count=len(pages)))
    done = subprocess.run(
        [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile{scheme}{width}",
         f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--window-size={width + 100},1000",
         "--virtual-time-budget=60000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    match = re.search(r"<title>SEEN(.*?)</title>", done.stdout, re.S)
    assert match, done.stderr[-2000:]
    found = json.loads(match[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    found.sort(key=lambda seen: seen.pop("index") if isinstance(seen.get("index"), int) else 0)
    return [Seen(**seen) for seen in found]
