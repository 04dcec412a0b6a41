// Refreshes the page from time to time. The page also works without it.
"use strict";

(() => {
  const live = document.getElementById("live");
  const watch = document.getElementById("watch");
  const state = document.getElementById("state");
  const every = Math.min(Number(watch.dataset.refresh) * 1000, 2 ** 31 - 1);
  const rest = Number(watch.dataset.rest);
  if (!(every > 0)) return;

  let timer = 0;
  let paused = false;
  let loading = false;
  let duration = 0;

  const button = document.createElement("button");
  button.type = "button";
  button.id = "pause";
  document.getElementById("reload").replaceWith(button);

  const showState = () => {
    const late = watch.classList.contains("late");
    const pause = Math.max(every, duration * rest) / 1000;
    button.textContent = paused ? "Resume" : "Pause";
    state.textContent = paused ? "Paused" : late ? "No answer; trying again" : `Live, every ${Math.round(pause * 10) / 10} s`;
  };

  // replacing an element between press and release would lose the click
  let pressed = false;
  addEventListener("pointerdown", () => { pressed = true; });
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => { pressed = false; });
  addEventListener("pointermove", (event) => { pressed = event.buttons !== 0; });

  // don't replace a form in use, or text that is being selected
  const busy = () => pressed || live.querySelector("details.act[open]") !== null || live.contains(document.activeElement?.form ?? null)
    || (!getSelection().isCollapsed && live.contains(getSelection().anchorNode));

  const schedule = () => {
    clearTimeout(timer);
    if (!paused && !document.hidden) timer = setTimeout(load, Math.max(every, duration * rest));
    showState();
  };

  const setLate = (late) => {
    watch.classList.toggle("late", late);
    live.classList.toggle("late", late);
  };

  const show = (html) => {
    const fresh = new DOMParser().parseFromString(html, "text/html").body;
    const states = new Map();
    for (const one of live.querySelectorAll("details[data-key]")) states.set(one.dataset.key, one.open);
    for (const one of fresh.querySelectorAll("details[data-key]")) {
      if (states.has(one.dataset.key)) one.open = states.get(one.dataset.key);
    }
    const focused = live.contains(document.activeElement) ? [...live.querySelectorAll("a, summary, [tabindex]")].indexOf(document.activeElement) : -1;
    const scrolled = [...live.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    live.replaceChildren(...fresh.childNodes);
    live.querySelectorAll(".scroll").forEach((one, index) => { one.scrollLeft = scrolled[index] ?? 0; });
    if (focused >= 0) live.querySelectorAll("a, summary, [tabindex]")[focused]?.focus({ preventScroll: true });
  };

  async function load() {
    if (loading) return;
    if (busy()) { schedule(); return; }
    loading = true;
    const began = performance.now();
    try {
      const answer = await fetch(`live${query()}`, { cache: "no-store", credentials: "same-origin", redirect: "error" });
      if (!answer.ok) throw new Error(answer.status);
      const html = await answer.text();
      duration = performance.now() - began;
      if (!busy()) show(html);
      setLate(false);
    } catch {
      setLate(true);
    } finally {
      loading = false;
      schedule();
    }
  }

  const query = () => {
    const semaphore = new URLSearchParams(location.search).get("of");
    return semaphore ? `?of=${encodeURIComponent(semaphore)}` : "";
  };

  button.addEventListener("click", () => {
    paused = !paused;
    if (paused) schedule(); else load();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer); else if (!paused) load();
  });
  schedule();
})();
