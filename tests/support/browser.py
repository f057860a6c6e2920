"""A browser that a test drives: Debian's chromium without a window, by its DevTools protocol.

What a page is for people who see little, hear it read out, or have no mouse is looked at by axe-core, the rules that
Lighthouse has, too (`Page.audit`). It comes in the wheel of axe-playwright-python, of which nothing else is used.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

START_S = 120.0
WAIT_S = 120.0  # for anything at all: only a hang reaches it


def found() -> str | None:
    """The browser's command; None: there is none here."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def axe() -> str | None:
    """The script of axe-core; None: it is not installed."""
    package = importlib.util.find_spec("axe_playwright_python")
    folders = [] if package is None else list(package.submodule_search_locations or [])
    return next((Path(one, "axe.min.js").read_text(encoding="utf-8") for one in folders), None)


# All rules of WCAG 2.2 AA and of good practice, and those that Lighthouse has besides. What axe-core cannot decide is
# the contrast of text within an image, and of single signs: `CONTRAST` and `SMALL` look at those as well.
AUDIT = """axe.run(document, {
  runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice", "experimental"],
  rules: Object.fromEntries(["target-size", "label-content-name-mismatch", "table-fake-caption", "td-has-header"]
    .map((one) => [one, {enabled: true}]).concat([["hidden-content", {enabled: false}]])),
}).then(({violations, incomplete, passes}) => ({
  rules: passes.map((one) => one.id),
  found: [...violations, ...incomplete.filter((one) => one.id !== "color-contrast")].flatMap((rule) =>
    rule.nodes.map((one) => `${rule.id}: ${one.html.slice(0, 160)}: ${one.failureSummary}`)),
}))"""
# Contrast of each text with what is behind it, as WCAG has it; those below 4.5.
CONTRAST = """(() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = (e) => parse(getComputedStyle(e).backgroundColor);
  const behind = (e) => !e ? [1, 1, 1] : ground(e).length < 4 || ground(e)[3] ? ground(e) : behind(e.parentElement);
  const low = [];
  for (const e of document.querySelectorAll("header *, main *, footer *, dialog *")) {
    const says = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!says || !e.getClientRects().length) continue;
    const svg = e instanceof SVGElement, style = getComputedStyle(e);
    const a = light(parse(svg ? style.fill : style.color)), b = light(behind(svg ? e.closest("section") : e));
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) low.push(`contrast of ${e.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return low;
})()"""
# Text that is smaller than Lighthouse wants it.
SMALL = """[...document.querySelectorAll("body *")].filter((e) => e.getClientRects().length &&
  [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && parseFloat(getComputedStyle(e).fontSize) < 12)
  .map((e) => `size of ${e.textContent.slice(0, 30)}: ${getComputedStyle(e).fontSize}`)"""


class Page:
    """A tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.errors: list[str] = []  # what the page complained of

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(WAIT_S):
            while True:
                message = json.loads((await self._socket.receive()).data)
                if message.get("method") == "Runtime.exceptionThrown":
                    self.errors.append(json.dumps(message["params"]["exceptionDetails"])[:2000])
                elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                    self.errors.append(json.dumps(message["params"]["entry"])[:2000])
                elif message.get("id") == number:
                    assert "error" not in message, message["error"]
                    result: dict[str, Any] = message["result"]
                    return result

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def ask(self, script: str) -> Any:
        """The value of an expression."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, why: str) -> None:
        """Waits until an expression is true; one that cannot be computed yet is not."""
        end_s = time.monotonic() + WAIT_S
        while not await self.ask(f"(() => {{ try {{ return !!({script}) }} catch {{ return false }} }})()"):
            text = await self.ask("document.body ? document.body.innerText : ''")
            assert time.monotonic() < end_s, f"not within {WAIT_S:g} s: {why}; the page says {text[:1500]}"
            await asyncio.sleep(0.1)

    async def press(self, key: str, **more: Any) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)

    async def look(self, width: int, height: int, scheme: str = "light") -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def audit(self) -> tuple[list[str], set[str]]:
        """What is wrong for who sees little, hears the page, or has no mouse; and the rules that found nothing wrong.

        Needs axe-core.
        """
        if not await self.ask("!!window.axe"):
            await self.ask(f"{axe()}; 0")
        seen = await self.ask(AUDIT)
        return [*seen["found"], *await self.ask(CONTRAST), *await self.ask(SMALL)], set(seen["rules"])

    async def shoot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def page(folder: Path) -> AsyncIterator[Page]:
    """A tab of a new browser, which keeps what it has in that folder. Ends with all its processes."""
    words = [
        *(str(found()), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--remote-debugging-port=0", "--disable-background-networking", "--disable-component-update"),
        *(f"--user-data-dir={folder}", "about:blank"),
    ]
    with (folder / "browser.log").open("wb") as out:
        browser = subprocess.Popen(words, stdout=out, stderr=out, start_new_session=True)
    try:
        end_s, place = time.monotonic() + START_S, folder / "DevToolsActivePort"
        while not place.is_file() or not re.match(r"\d+\n", place.read_text()):
            assert browser.poll() is None and time.monotonic() < end_s, (folder / "browser.log").read_text()
            await asyncio.sleep(0.1)
        port = int(place.read_text().splitlines()[0])
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tab = next(one for one in await answer.json(content_type=None) if one["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)
        browser.wait(WAIT_S)
