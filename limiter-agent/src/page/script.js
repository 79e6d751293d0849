// Renews the page in place, so that focus and scroll stay. Without it, the page is loaded anew.
"use strict";
(() => {
  const seconds = Number(document.documentElement.dataset.refresh);
  const stale = document.getElementById("stale");
  if (!seconds) return;

  function put(fresh) {
    const old = document.querySelector("main");
    const focus = document.activeElement?.id;
    const open = [...old.querySelectorAll("details[open]")].map((it) => it.id);
    const scrolled = [...old.querySelectorAll(".wide")].map((it) => [it.id, it.scrollLeft]);
    old.replaceWith(fresh.querySelector("main"));
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    for (const [id, left] of scrolled) {
      const it = document.getElementById(id);
      if (it) it.scrollLeft = left;
    }
    if (focus) document.getElementById(focus)?.focus({ preventScroll: true });
    document.title = fresh.title;
  }

  async function renew() {
    try {
      if (!document.hidden) {
        const answer = await fetch(location.href, { signal: AbortSignal.timeout(10000) });
        if (!answer.ok) throw new Error(answer.statusText);
        put(new DOMParser().parseFromString(await answer.text(), "text/html"));
        stale.hidden = true;
      }
    } catch {
      stale.hidden = false;
    }
    setTimeout(renew, seconds * 1000);
  }
  setTimeout(renew, seconds * 1000);
})();
