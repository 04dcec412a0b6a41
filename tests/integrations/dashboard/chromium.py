"""A headless Chromium, spoken to through a pipe: no port, no driver, and nothing that it would ask of a network."""

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

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


class Chromium:
    """A browser: sends commands, waits for answers, and stores events."""

    def __init__(self, process: subprocess.Popen[bytes], there: int, here: int) -> None:
        self._process, self._there, self._here = process, there, here
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Send one command and wait for its answer."""
        answer = self.try_(method, session, **parameters)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def try_(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The same, be the answer an error."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._there, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                return answer
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            assert time.monotonic() < end, "Chromium doesn't answer"
            if readable(self._here, within=1.0):
                data = os.read(self._here, 1 << 20)
                assert data, f"Chromium has ended with {self._process.wait(PATIENCE)}"
                self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    @contextlib.contextmanager
    def tab(self, *, javascript: bool = True, width: int = 1280, height: int = 900, **media: str) -> Iterator[Tab]:
        """A tab that shares nothing with any other: cookies, too, are its own."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.ask(f"{domain}.enable")
        tab.size(width, height)
        if not javascript:
            tab.ask("Emulation.setScriptExecutionDisabled", value=True)
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        tab.ask("Emulation.setEmulatedMedia", features=features)
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

    def size(self, width: int, height: int) -> None:
        phone = width < 600
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def open(self, url: str) -> None:
        """Go there, and be there when all of it is loaded."""
        self.ask("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def tell(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Return when it has become true, on this page or on one that follows."""
        end = time.monotonic() + PATIENCE
        while True:
            # a page that is just being left knows nothing
            answer = self._browser.try_(
                "Runtime.evaluate", self._session, expression=f"Boolean({expression})", returnByValue=True
            )
            if answer.get("result", {}).get("result", {}).get("value") is True:
                return
            assert time.monotonic() < end, f"{expression} did not come true:\n{self.text()}"
            time.sleep(0.02)

    def text(self) -> str:
        """Return the visible text."""
        return str(self.tell("document.body.innerText"))

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of it, and let go."""
        at = self.at(selector)
        for what in ("mousePressed", "mouseReleased"):
            self.mouse(what, at)

    def mouse(self, what: str, at: list[float]) -> None:
        """One movement of a finger."""
        self.ask("Input.dispatchMouseEvent", type=what, x=at[0], y=at[1], button="left", clickCount=1)

    def at(self, selector: str) -> list[float]:
        """The middle of it, which is in sight then."""
        found = json.dumps(selector)
        self.until(f"document.querySelector({found})?.getClientRects().length")
        at: list[float] = self.tell(
            f"(() => {{ const one = document.querySelector({found}); one.scrollIntoView({{block: 'center'}});"
            "const box = one.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        return at

    def complaints(self) -> list[str]:
        """Return errors of the console, such as violations of the page's policy."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                found.append(str(event["params"]["entry"]["text"]))
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
        return found

    def asked_for(self) -> list[str]:
        """Every address that the page had anything from."""
        return [
            str(event["params"]["request"]["url"])
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] == "Network.requestWillBeSent"
        ]

    def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of it."""
        options: dict[str, Any] = {}
        if whole:
            size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
            options = {"captureBeyondViewport": True, "clip": {**size, "x": 0, "y": 0, "scale": 1}}
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png", **options)["data"])


@contextlib.contextmanager
def chromium() -> Iterator[Chromium]:
    """Start it; without a browser skip the test, or fail it under ``CI=true``."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        why = "there is no Chromium here (Debian's package chromium)"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    with contextlib.ExitStack() as opened:
        profile = opened.enter_context(tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True))
        its_in, there = os.pipe()
        here, its_out = os.pipe()

        def wire() -> None:
            # it reads from 3 and writes to 4; moved out of the way first, in case they are those already
            first, second = os.dup(its_in), os.dup(its_out)
            high = [os.dup(each) for each in (first, second)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        process = subprocess.Popen(
            [found, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=wire,
            start_new_session=True,
            env={**os.environ, "HOME": profile},
        )
        os.close(its_in)
        os.close(its_out)
        browser = Chromium(process, there, here)
        try:
            yield browser
        finally:
            with contextlib.suppress(Exception):
                browser.ask("Browser.close")
            with contextlib.suppress(OSError):
                os.close(there)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, 9)
                process.wait(PATIENCE)
            os.close(here)
