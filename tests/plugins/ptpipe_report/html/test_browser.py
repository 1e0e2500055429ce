"""The report in a real browser, light and dark, wide and narrow: nothing overlaps, is cut off, or complains.

Needs Chromium; Debian: `apt-get install chromium`. Talks to it by the DevTools protocol over pipes.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ptpipe_report.html.report import render

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")

# Boxes of what stands beside and below each other; a box in another one is no overlap.
OVERLAPS = """
(() => {
  const shown = [...document.querySelectorAll(
    'h1, h2, h3, p, li, figure, table, dt, dd, pre, summary, .tile, svg text.tick, svg text.label, svg text.name')]
    .filter(of => of.getClientRects().length && !of.closest('.hidden') && of.textContent.trim());
  const boxes = shown.map(of => of.getBoundingClientRect());
  const found = [];
  for (let a = 0; a < shown.length; a++)
    for (let b = a + 1; b < shown.length; b++) {
      if (shown[a].contains(shown[b]) || shown[b].contains(shown[a])) continue;
      if (shown[a].closest('svg text[transform]') || shown[b].closest('svg text[transform]')) continue;
      const width = Math.min(boxes[a].right, boxes[b].right) - Math.max(boxes[a].left, boxes[b].left);
      const height = Math.min(boxes[a].bottom, boxes[b].bottom) - Math.max(boxes[a].top, boxes[b].top);
      // What is scrolled out of sight overlaps nothing outside.
      if (shown[a].closest('.scroll') === shown[b].closest('.scroll') && width > 2 && height > 4)
        found.push([a, b].map(of => shown[of].textContent.trim().slice(0, 40)).join(' / '));
    }
  return found;
})()
"""
CUT_OFF = """
[...document.querySelectorAll('svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text')].filter(of => {
    const box = of.getBoundingClientRect();
    return box.left < frame.left - 2 || box.right > frame.right + 2
      || box.top < frame.top - 3 || box.bottom > frame.bottom + 3;
  }).map(of => of.textContent);
})
"""
SMALLEST_TEXT_PX = """
Math.min(...[...document.querySelectorAll('svg text.tick')].map(of => {
  const svg = of.ownerSVGElement;
  return parseFloat(getComputedStyle(of).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
}))
"""
OVERFLOW_PX = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
FAINT_TEXTS = """
(() => {
  const parse = color => (color.match(/[\\d.]+/g) || []).map(Number);
  const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = of => {
    for (; of; of = of.parentElement) {
      const color = parse(getComputedStyle(of).backgroundColor);
      if (color.length && color[3] !== 0) return color;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll('body *')]
    .filter(of => of.children.length === 0 && of.textContent.trim() && !of.closest('svg'))
    .map(of => {
      const a = light(parse(getComputedStyle(of).color)), b = light(ground(of));
      return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), of.className + ' ' + of.textContent.slice(0, 30)];
    }).filter(of => of[0] < 4.5);
})()
"""


class Browser:
    """A headless Chromium with one page."""

    def __init__(self, folder: Path) -> None:
        commands_read, self._commands = os.pipe()
        self._answers, answers_write = os.pipe()
        options = ["--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += ["--disable-dev-shm-usage", f"--user-data-dir={folder}"]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses it to root
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        script = f'exec "$0" "$@" 3<&{commands_read} 4>&{answers_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *options, "about:blank"],
            pass_fds=(commands_read, answers_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_read)
        os.close(answers_write)
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._commands)
        self._process.terminate()
        self._process.wait(20)
        os.close(self._answers)

    def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return next(answer["result"] for answer in self._messages() if answer.get("id") == number)

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" not in self._rest:
                chunk = os.read(self._answers, 1 << 20)
                assert chunk, "Chromium ended"
                self._rest += chunk
            line, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(line)
            assert "error" not in message, message
            if message.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.complaints.append(json.dumps(message["params"]))
            yield message

    def open(self, file: Path, width: int, scheme: str) -> None:
        self.complaints.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=file.as_uri())
        next(message for message in self._messages() if message.get("method") == "Page.loadEventFired")

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, file: Path) -> None:
        content = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(content))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_report_is_laid_out_well(browser, run, tmp_path, width, scheme):
    started, finished = run
    file = tmp_path / "report.html"
    file.write_text(render(started, finished), encoding="utf-8")
    browser.open(file, width, scheme)
    browser.screenshot(tmp_path / f"{width}-{scheme}.png")
    assert browser.complaints == []
    assert browser.value(OVERFLOW_PX) == 0
    browser.value("document.querySelectorAll('details').forEach(of => of.open = true)")
    assert browser.value(OVERFLOW_PX) == 0
    assert browser.value(OVERLAPS) == []
    assert browser.value(CUT_OFF) == []
    assert browser.value(SMALLEST_TEXT_PX) >= 8
    assert browser.value(FAINT_TEXTS) == [], "the contrast of text is at least 4.5"
    is_dark = browser.value("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert is_dark == (scheme == "dark")


def test_a_page_of_paper_holds_it_in_black_on_white(browser, run, tmp_path):
    file = tmp_path / "report.html"
    file.write_text(render(*run), encoding="utf-8")
    browser.open(file, 740, "dark")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.call("Emulation.setEmulatedMedia", media="print", features=features)
    assert browser.value(OVERFLOW_PX) == 0
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    browser.call("Emulation.setEmulatedMedia", media="")


def test_the_policy_is_in_force(browser, run, tmp_path):
    """Whatever got into the page all the same would not run, load or restyle."""
    injected = (
        "<script>document.title = 'attacked'</script><p style='color: red'>x</p><img src='file:///etc/hostname'></body>"
    )
    file = tmp_path / "report.html"
    file.write_text(render(*run).replace("</body>", injected), encoding="utf-8")
    browser.open(file, 1280, "light")
    assert "attacked" not in browser.value("document.title")
    assert browser.value("getComputedStyle(document.querySelector('p[style]')).color") != "rgb(255, 0, 0)"
    assert len([of for of in browser.complaints if "Content Security Policy" in of]) == 3


def test_overlaps_and_overflow_are_found(browser, tmp_path):
    file = tmp_path / "bad.html"
    file.write_text(
        "<!DOCTYPE html><body style='margin:0'><h1>one two three</h1><p style='margin-top:-40px'>four five</p>"
        "<pre style='width:3000px'>x</pre><p style='color:#999'>faint</p><svg width=100 height=20 viewBox='0 0 100 20'>"
        "<text class=tick x=80 y=14>cut off</text></svg>",
        encoding="utf-8",
    )
    browser.open(file, 1280, "light")
    assert browser.value(OVERFLOW_PX) > 1000
    assert browser.value(OVERLAPS) == ["one two three / four five"]
    assert browser.value(CUT_OFF) == ["cut off"]
    assert len(browser.value(FAINT_TEXTS)) == 1
