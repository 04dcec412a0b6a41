"""In a browser: with its scripts and without, and on a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import create_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.dashboard.serving import served
from tests.fixtures.parties import unused
from tests.integrations.dashboard.chromium import Chromium

Make = Callable[..., str]
#: has a page know its timers that are still to come, and what it has fetched
WATCHED = """
window.waiting = new Set(); window.fetched = 0;
const later = window.setTimeout, never = window.clearTimeout, get = window.fetch;
window.setTimeout = (call, time) => {
  const one = later(() => { waiting.delete(one); call(); }, time);
  waiting.add(one);
  return one;
};
window.clearTimeout = (one) => { waiting.delete(one); never(one); };
window.fetch = (...what) => { fetched += 1; return get(...what); };
"""


@pytest.fixture
def locks(databases: Callable[[str], tuple[str, str]]) -> Iterator[sl.Locks]:
    engine = create_engine(databases("sqlite")[0])
    yield sl.Locks(engine)
    engine.dispose()


def test_page_refreshes(browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    """What is folded stays folded."""
    name, other = semaphore(owner="the first one"), unused("holder")
    with served(locks, refresh=0.2) as address, browser.tab() as tab:
        tab.open(f"{address}?of={quote(name)}")
        tab.click("details.people summary")
        assert "the first one" not in tab.text()
        assert locks.acquire({name: 1}, external_id=other, owner="the new one", ttl=3600)
        tab.until("document.querySelector('[role=meter]').getAttribute('aria-valuetext') === '2 of 3'")
        assert tab.tell("document.querySelector('details.people').open") is False
        tab.click("details.people summary")
        assert "the new one" in tab.text()
        assert tab.complaints() == []


def test_refresh_pauses_when_hidden_or_paused(browser: Chromium, locks: sl.Locks) -> None:
    """In a hidden tab, and after a click on Pause; what was under way comes to its end, and nothing follows."""
    hide = "Object.defineProperty(document, 'hidden', {configurable: true, get: () => %s})"
    with served(locks, refresh=0.2) as address, browser.tab() as tab:
        tab.ask("Page.addScriptToEvaluateOnNewDocument", source=WATCHED)
        tab.open(address)
        tab.until("fetched > 1 && waiting.size === 1")
        for value in ("true", "false"):
            tab.tell(hide % value)
            tab.tell("document.dispatchEvent(new Event('visibilitychange'))")
            tab.until("waiting.size === 0" if value == "true" else "waiting.size === 1")
        tab.click("#pause")
        tab.until("document.getElementById('state').textContent === 'Paused' && waiting.size === 0")
        fetched = tab.tell("fetched")
        tab.click("#pause")
        tab.until(f"fetched > {fetched}")


def test_missing_answer_is_shown(browser: Chromium, locks: sl.Locks) -> None:
    with served(locks, refresh=0.2) as address, browser.tab() as tab:
        tab.open(address)
        tab.until("document.getElementById('state').textContent.startsWith('Live')")
        engine, locks._engine = locks._engine, create_engine("sqlite:////no/such/folder/at.db")
        tab.until("document.getElementById('state').textContent.startsWith('No answer')")
        assert "Sweeps and clean-ups" in tab.text()
        locks._engine = engine
        tab.until("document.getElementById('state').textContent.startsWith('Live')")


@pytest.mark.parametrize("javascript", [True, False], ids=["with scripts", "without"])
def test_click_releases_permits(javascript: bool, browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    name = semaphore(owner="web-7")
    with served(locks, refresh=0.2, authorize=lambda request: "alice", secret="s") as address:
        with browser.tab(javascript=javascript) as tab:
            tab.open(f"{address}?of={quote(name)}")
            assert "web-7" in tab.text()
            assert tab.tell("document.querySelector('#pause') !== null") is javascript
            # other tests' queues have actions, too
            tab.click(".acts .act:has(input[name=request]) summary")
            tab.click(".acts .act:has(input[name=request]) button")
            tab.until("document.querySelector('.message') !== null")
            assert f"Released '{name}'" in tab.text()
            assert "web-7" not in tab.text()
            assert tab.complaints() == []
    assert locks.release(name) is sl.Released.ALREADY_RELEASED


def test_refresh_keeps_an_open_form(browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    name = semaphore(capacity=3)
    with served(locks, refresh=0.2, authorize=lambda request: "bob", secret="s") as address, browser.tab() as tab:
        tab.ask("Page.addScriptToEvaluateOnNewDocument", source=WATCHED)
        tab.open(f"{address}?of={quote(name)}")
        tab.until("fetched > 0")
        tab.click(".under > .act summary")
        tab.tell("document.querySelector('.act input[name=capacity]').value = '17'")
        # it comes to its next look, and waits again without having looked
        tab.tell("window.timer = [...waiting][0]")
        tab.until("waiting.size === 1 && !waiting.has(timer)")
        assert tab.tell("document.querySelector('.act input[name=capacity]').value") == "17"
        tab.click(".under > .act button")
        tab.until("document.querySelector('.message') !== null")
        assert "has a capacity of 17 now; it was 3" in tab.text()
    change: Any = locks.run(sl.semaphore.history(name))[0]
    assert (change.new_capacity, change.changed_by) == (17, "bob")


@pytest.mark.parametrize("width", [390, 1400])
def test_layout_fits_the_width(width: int, browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    """However long the names are, the page is as wide as the window."""
    semaphore(name=unused("n" * 200), owner="o" * 255)
    with served(locks, authorize=lambda request: "w" * 255, secret="s") as address, browser.tab(width=width) as tab:
        tab.open(address)
        assert tab.tell("document.documentElement.scrollWidth") <= width
