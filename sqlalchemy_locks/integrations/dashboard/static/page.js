// Looks again, from time to time: the page is whole without it.
"use strict";

(() => {
  const live = document.getElementById("live");
  const watch = document.getElementById("watch");
  const state = document.getElementById("state");
  const every = Number(watch.dataset.refresh) * 1000;
  const rest = Number(watch.dataset.rest);
  if (!(every > 0)) return;

  let timer = 0;
  let paused = false;
  let looking = false;
  let took = 0;

  const button = document.createElement("button");
  button.type = "button";
  button.id = "pause";
  document.getElementById("reload").replaceWith(button);

  const say = () => {
    const late = watch.classList.contains("late");
    const pause = Math.max(every, took * rest) / 1000;
    button.textContent = paused ? "Go on" : "Pause";
    state.textContent = paused ? "Paused" : late ? "No answer; trying again" : `Live, every ${Math.round(pause * 10) / 10} s`;
  };

  // a press on what is replaced before it is let go of would be no click
  let pressed = false;
  addEventListener("pointerdown", () => { pressed = true; });
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => { pressed = false; });
  addEventListener("pointermove", (event) => { pressed = event.buttons !== 0; });

  // what somebody is about to do, or to select, is not taken away from under their hands
  const busy = () => pressed || live.querySelector("details.act[open]") !== null || live.contains(document.activeElement?.form ?? null)
    || (!getSelection().isCollapsed && live.contains(getSelection().anchorNode));

  const next = () => {
    clearTimeout(timer);
    if (!paused && !document.hidden) timer = setTimeout(look, Math.max(every, took * rest));
    say();
  };

  const late = (is) => {
    watch.classList.toggle("late", is);
    live.classList.toggle("late", is);
  };

  const show = (html) => {
    const fresh = new DOMParser().parseFromString(html, "text/html").body;
    const known = new Map();
    for (const one of live.querySelectorAll("details[data-key]")) known.set(one.dataset.key, one.open);
    for (const one of fresh.querySelectorAll("details[data-key]")) {
      if (known.has(one.dataset.key)) one.open = known.get(one.dataset.key);
    }
    const focused = live.contains(document.activeElement) ? [...live.querySelectorAll("a, summary, [tabindex]")].indexOf(document.activeElement) : -1;
    const scrolled = [...live.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    live.replaceChildren(...fresh.childNodes);
    live.querySelectorAll(".scroll").forEach((one, index) => { one.scrollLeft = scrolled[index] ?? 0; });
    if (focused >= 0) live.querySelectorAll("a, summary, [tabindex]")[focused]?.focus({ preventScroll: true });
  };

  async function look() {
    if (looking) return;
    if (busy()) { next(); return; }
    looking = true;
    const began = performance.now();
    try {
      const answer = await fetch(`live${of()}`, { cache: "no-store", credentials: "same-origin", redirect: "error" });
      if (!answer.ok) throw new Error(answer.status);
      const html = await answer.text();
      took = performance.now() - began;
      if (!busy()) show(html);
      late(false);
    } catch {
      late(true);
    } finally {
      looking = false;
      next();
    }
  }

  const of = () => {
    const asked = new URLSearchParams(location.search).get("of");
    return asked ? `?of=${encodeURIComponent(asked)}` : "";
  };

  button.addEventListener("click", () => {
    paused = !paused;
    if (paused) next(); else look();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer); else if (!paused) look();
  });
  next();
})();
