"""A headless Chromium, spoken to through a pipe by its DevTools protocol: no port, and no driver to install."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fixtures.descriptors import readable
from tests.fixtures.parties import PATIENCE

_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


class Chromium:
    """A browser: sends commands, waits for answers, and stores events."""

    def __init__(self, there: int, here: int) -> None:
        self._there, self._here = there, here
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Send one command and return its answer, an error too."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._there, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                return answer.get("result", answer)
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert readable(self._here, within=PATIENCE), "Chromium doesn't answer"
            data = os.read(self._here, 1 << 20)
            assert data, "Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    @contextlib.contextmanager
    def tab(self, *, javascript: bool = True, width: int = 1280, height: int = 900, scheme: str = "") -> Iterator[Tab]:
        """A tab that shares nothing with any other: cookies, too, are its own."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        tab = Tab(self, self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            tab.ask(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        tab.ask("Emulation.setDeviceMetricsOverride", **size)
        tab.ask("Emulation.setScriptExecutionDisabled", value=not javascript)
        tab.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        try:
            yield tab
        finally:
            self.ask("Target.disposeBrowserContext", browserContextId=context)


class Tab:
    """A tab, and a visitor's actions in it."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session

    def ask(self, method: str, **parameters: Any) -> Any:
        return self._browser.ask(method, self._session, **parameters)

    def open(self, url: str) -> None:
        """Go there, and be there when all of it is loaded."""
        self.ask("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def tell(self, expression: str) -> Any:
        """Evaluate an expression in the page; ``None`` also for one that fails, as in a page that is just being left."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer.get("result", {}).get("value")

    def until(self, expression: str) -> None:
        """Return when it has become true, on this page or on one that follows."""
        end = time.monotonic() + PATIENCE
        while self.tell(f"Boolean({expression})") is not True:
            assert time.monotonic() < end, f"{expression} did not come true:\n{self.text()}"
            time.sleep(0.02)

    def text(self) -> str:
        """Return the visible text."""
        return str(self.tell("document.body.innerText"))

    def click(self, selector: str) -> None:
        self.until(f"document.querySelector({json.dumps(selector)})?.getClientRects().length")
        self.tell(f"document.querySelector({json.dumps(selector)}).click()")

    def complaints(self) -> list[str]:
        """Return errors of the console, such as violations of the page's policy."""
        return [
            str(event["params"])
            for event in self._browser.events
            if event.get("sessionId") == self._session
            if event["method"] == "Runtime.exceptionThrown"
            or (event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"))
        ]

    def picture(self) -> bytes:
        """A PNG of it."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def chromium() -> Iterator[Chromium]:
    """Start it; without a browser skip the test, or fail it under ``CI=true``."""
    program = shutil.which("chromium")
    if program is None:
        why = "there is no Chromium here (Debian's package chromium)"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        its_in, there = os.pipe()
        here, its_out = os.pipe()
        # it reads from 3 and writes to 4
        command = f'exec "$@" 3<&{its_in} 4>&{its_out}'
        process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(its_in, its_out),
            env={**os.environ, "HOME": profile},
        )
        os.close(its_in)
        os.close(its_out)
        browser = Chromium(there, here)
        try:
            yield browser
        finally:
            browser.ask("Browser.close")
            os.close(there)
            process.wait(PATIENCE)
            os.close(here)
