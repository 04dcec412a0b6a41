"""In a browser: with its scripts and without, by mouse, in the dark, on a phone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine

import sqlalchemy_locks as sl
from sqlalchemy_locks.integrations.dashboard.serving import served
from tests.conftest import Servers, install
from tests.fixtures.crowd import crowd
from tests.fixtures.parties import unused
from tests.integrations.dashboard.chromium import Chromium, Tab

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


def hidden(tab: Tab, is_: bool) -> None:
    """As if the visitor went to another tab."""
    value = str(is_).lower()
    tab.tell(f"Object.defineProperty(document, 'hidden', {{configurable: true, get: () => {value}}})")
    tab.tell("document.dispatchEvent(new Event('visibilitychange'))")


def test_page_refreshes(browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    name, other = semaphore(held=0), unused("holder")
    with served(locks, refresh=0.2) as address, browser.tab() as tab:
        tab.open(f"{address}?of={name.replace(' ', '%20')}")
        assert "No permits are held" in tab.text()
        assert locks.acquire({name: 2}, external_id=other, owner="the new one", ttl=3600)
        tab.until("document.body.innerText.includes('the new one')")
        assert tab.tell("document.querySelector('[role=meter]').getAttribute('aria-valuetext')") == "2 of 3"
        # the page itself was asked for once: what is new has come into it
        asked = tab.asked_for()
        assert sum("/?of=" in each for each in asked) == 1
        assert sum("/live?of=" in each for each in asked) >= 1
        assert all(each.startswith(address) for each in asked)
        locks.release(other)
        tab.until("document.body.innerText.includes('No permits are held')")
        assert tab.complaints() == []


def test_refresh_keeps_details_open(browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    name = semaphore(owner="the only one")
    with served(locks, refresh=0.2) as address, browser.tab() as tab:
        tab.ask("Page.addScriptToEvaluateOnNewDocument", source=WATCHED)
        tab.open(f"{address}?of={name.replace(' ', '%20')}")
        assert "the only one" in tab.text()
        tab.click("details.people summary")
        tab.until("!document.querySelector('details.people').open")
        seen = tab.tell("fetched")
        tab.until(f"fetched > {seen} + 1")
        assert tab.tell("document.querySelector('details.people').open") is False
        assert tab.tell("document.activeElement.tagName") == "SUMMARY"


def test_refresh_pauses_when_hidden_or_paused(browser: Chromium, locks: sl.Locks) -> None:
    """In a hidden tab, and after a click on Pause."""
    with served(locks, refresh=0.2) as address, browser.tab() as tab:
        tab.ask("Page.addScriptToEvaluateOnNewDocument", source=WATCHED)
        tab.open(address)
        tab.until("fetched > 1")
        tab.until("waiting.size === 1")
        hidden(tab, True)
        # what was under way comes to its end, and nothing follows
        tab.until("waiting.size === 0")
        seen = tab.tell("fetched")
        hidden(tab, False)
        tab.until(f"fetched > {seen}")
        tab.until("document.getElementById('state').textContent.startsWith('Live')")
        tab.click("#pause")
        tab.until("document.getElementById('state').textContent === 'Paused'")
        tab.until("waiting.size === 0")
        assert tab.tell("document.getElementById('pause').textContent") == "Resume"
        seen = tab.tell("fetched")
        tab.click("#pause")
        tab.until(f"fetched > {seen}")


def test_refresh_waits_for_a_mouse_press(browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    """Though the page wants to look again before the button is let go of."""
    name = semaphore()
    with served(locks, refresh=0.2) as address, browser.tab() as tab:
        tab.ask("Page.addScriptToEvaluateOnNewDocument", source=WATCHED)
        tab.open(f"{address}?of={name.replace(' ', '%20')}")
        tab.until("fetched > 0 && waiting.size === 1")
        at = tab.at("details.people summary")
        tab.mouse("mousePressed", at)
        tab.tell("window.summary = document.querySelector('details.people summary')")
        # it comes to its next look, and waits again without having looked
        tab.tell("window.timer = [...waiting][0]")
        tab.until("waiting.size === 1 && !waiting.has(timer)")
        assert tab.tell("document.querySelector('details.people summary') === summary") is True
        tab.mouse("mouseReleased", at)
        tab.until("!document.querySelector('details.people').open")


def test_missing_answer_is_shown(browser: Chromium, locks: sl.Locks) -> None:
    answers = threading.Event()
    answers.set()
    with served(locks, refresh=0.2, authorize=lambda request: answers.is_set(), secret="s") as address:
        with browser.tab() as tab:
            tab.open(address)
            tab.until("document.getElementById('state').textContent.startsWith('Live')")
            engine, locks._engine = locks._engine, create_engine("sqlite:////no/such/folder/at.db")
            tab.until("document.getElementById('state').textContent.startsWith('No answer')")
            assert "Semaphores" in tab.text()
            locks._engine = engine
            tab.until("document.getElementById('state').textContent.startsWith('Live')")


@pytest.mark.parametrize("javascript", [True, False], ids=["with scripts", "without"])
def test_click_releases_permits(javascript: bool, browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    name = semaphore(owner="web-7")
    at = name.replace(" ", "%20")
    with served(locks, refresh=0.2, authorize=lambda request: "alice", secret="s") as address:
        with browser.tab(javascript=javascript) as tab:
            tab.open(f"{address}?of={at}")
            assert "web-7" in tab.text()
            assert tab.tell("document.querySelector('#pause') !== null") is javascript
            # other tests' queues have actions, too
            tab.click(".acts .act:has(input[name=request]) summary")
            tab.click(".acts .act:has(input[name=request]) button")
            tab.until("document.querySelector('.message') !== null")
            assert f"Released '{name}'" in tab.text()
            assert "web-7" not in tab.text()
            assert "acting as alice" in tab.text()
            assert tab.complaints() == []
    assert locks.release(name) is sl.Released.ALREADY_RELEASED


def test_refresh_keeps_an_open_form(browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    name = semaphore(capacity=3)
    with served(locks, refresh=0.2, authorize=lambda request: "bob", secret="s") as address, browser.tab() as tab:
        tab.ask("Page.addScriptToEvaluateOnNewDocument", source=WATCHED)
        tab.open(f"{address}?of={name.replace(' ', '%20')}")
        tab.until("fetched > 0")
        tab.click(".under > .act summary")
        tab.click(".act input[name=capacity]")
        tab.tell("document.activeElement.select()")
        tab.ask("Input.insertText", text="17")
        # it waits again, without having looked
        tab.until("waiting.size === 1")
        assert tab.tell("document.querySelector('.act input[name=capacity]').value") == "17"
        tab.click(".under > .act button")
        tab.until("document.querySelector('.message') !== null")
        assert "has a capacity of 17 now; it was 3" in tab.text()
    change: Any = locks.run(sl.semaphore.history(name))[0]
    assert (change.new_capacity, change.changed_by) == (17, "bob")


def test_page_works_without_javascript(browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    name = semaphore(owner="web-8")
    with served(locks) as address, browser.tab(javascript=False) as tab:
        tab.open(f"{address}?of={name.replace(' ', '%20')}")
        text = tab.text()
        for part in ("web-8", "Holders by age", "Engine and schema", "Reload", "read-only"):
            assert part in text
        locks.release(name)
        tab.click("#reload")
        tab.until("document.body.innerText.includes('No permits are held')")
        assert not any("/live" in each for each in tab.asked_for())


def test_hostile_names_run_no_script(browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    name = semaphore(
        name=unused('<img src=x onerror="window.hit=1"><script>window.hit=1</script>'),
        owner="<svg onload=window.hit=1>",
        external_id=unused('"><script>window.hit=1</script>{{ 7*7 }}'),
    )
    with served(locks, refresh=0.2, authorize=lambda request: name, secret="s") as address, browser.tab() as tab:
        tab.ask("Page.addScriptToEvaluateOnNewDocument", source=WATCHED)
        tab.open(address)
        tab.until("fetched > 0")
        tab.until("document.body.innerText.includes('<img src=x')")
        assert tab.tell("window.hit === undefined") is True
        assert tab.complaints() == []


def test_accessibility_tree(browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    name = semaphore(capacity=4, held=3)
    with served(locks) as address, browser.tab() as tab:
        tab.open(f"{address}?of={name.replace(' ', '%20')}")
        tab.ask("Accessibility.enable")
        nodes = [node for node in tab.ask("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
        known = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]
        assert ("meter", f"Permits of {name} in use") in known
        assert {"Locks", f"Semaphore {name}", name, "Queues"} <= {text for role, text in known if role == "heading"}
        assert {"main", "table", "columnheader", "button"} <= {role for role, _ in known}
        unnamed = [role for role, text in known if role in ("table", "region", "button", "link", "meter") and not text]
        assert unnamed == []


def test_dark_mode_and_reduced_motion(browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    semaphore()
    grounds, moves = set(), []
    with served(locks) as address:
        for scheme, motion in (("light", "no-preference"), ("dark", "reduce")):
            with browser.tab(prefers_color_scheme=scheme, prefers_reduced_motion=motion) as tab:
                tab.open(address)
                grounds.add(tab.tell("getComputedStyle(document.body).backgroundColor"))
                moves.append(tab.tell("getComputedStyle(document.querySelector('.bar .part')).transitionDuration"))
    assert len(grounds) == 2
    assert moves == ["0.3s", "0s"]


@pytest.mark.parametrize("width", [320, 390, 800, 1400])
def test_layout_fits_the_width(width: int, browser: Chromium, locks: sl.Locks, semaphore: Make) -> None:
    """However long the names are, the page is as wide as the window."""
    semaphore(name=unused("n" * 200), owner="o" * 255)
    with served(locks, authorize=lambda request: "w" * 255, secret="s") as address, browser.tab(width=width) as tab:
        tab.open(address)
        assert tab.tell("document.documentElement.scrollWidth") <= width


@pytest.fixture(scope="module")
def crowded(servers: Servers) -> Iterator[sl.Locks]:
    """A database with 120 queues, and many of everything."""
    url = servers.fresh("sqlite", "pysqlite")
    install(url)
    engine = create_engine(url)
    crowd(engine, semaphores=400, held=900, released=0, jobs=2_000, queues=120, mutexes=200, timeouts=200)
    yield sl.Locks(engine)
    engine.dispose()


def test_layout_with_many_rows(browser: Chromium, crowded: sl.Locks) -> None:
    with served(crowded) as address, browser.tab(width=1280, height=900) as tab:
        tab.open(address)
        top = "document.getElementById({!r}).getBoundingClientRect().top"
        assert tab.tell(top.format("queues")) < 300
        assert tab.tell(top.format("semaphores")) < 900
        assert tab.tell("document.querySelector('.semaphores h3').innerText") == "semaphore-1"
        # neither column is much longer than the other
        left, right = tab.tell("[...document.querySelectorAll('.two > div')].map((one) => one.offsetHeight)")
        assert max(left, right) < 2 * min(left, right)
        assert tab.tell("document.documentElement.scrollHeight") < 5 * 900
        # a name is on one line
        assert tab.tell("[...document.querySelectorAll('td bdi, th bdi')].every((one) => one.offsetHeight < 30)")


def test_tables_scroll_on_a_phone(browser: Chromium, crowded: sl.Locks) -> None:
    with served(crowded) as address, browser.tab(width=390, height=844) as tab:
        tab.open(address)
        assert tab.tell("document.documentElement.scrollWidth") <= 390
        queues = "document.querySelector('.scroll[aria-labelledby=queues]')"
        assert tab.tell(f"{queues}.scrollWidth > {queues}.clientWidth")
        # the shadows at the edges: four stay where they are, the others move with the contents
        assert "local" in tab.tell(f"getComputedStyle({queues}).backgroundAttachment")
        tab.tell(f"{queues}.scrollLeft = 50")
        assert tab.tell(f"{queues}.scrollLeft") == 50
