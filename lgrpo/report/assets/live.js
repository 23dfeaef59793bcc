// Reloading while the run continues: the page of `lgrpo report --watch` reloads itself at its interval.
// Defines: liveButton, keepScrollPosition, reloadPeriodically.

function liveButton({ data }) {
  const button = el("button", { class: "pill live", onclick: () => {
    remember("still", saved.get("still") ? "" : "1");
    update();
  } });
  const update = () => {
    const isPaused = Boolean(saved.get("still"));
    button.classList.toggle("off", isPaused);
    button.textContent = isPaused ? "paused" : `live, every ${data.refresh} s`;
  };
  update();
  return button;
}

function keepScrollPosition({ data }) {
  try {
    const key = `lgrpo.scroll.${location.pathname}`;
    const y = sessionStorage.getItem(key);
    if (data.refresh && y !== null) scrollTo(0, Number(y));
    addEventListener("pagehide", () => sessionStorage.setItem(key, scrollY));
  } catch { /* without storage the page starts at its top */ }
}

// A reload waits while it would interrupt the reader: paused, typing, selecting text, or reading a completion.
function reloadPeriodically({ data }) {
  if (!data.refresh) return;
  let lastKey = 0;
  addEventListener("keydown", () => { lastKey = Date.now(); });
  const reload = () => {
    const isReading = !getSelection().isCollapsed || document.querySelector("tr.detail");
    if (saved.get("still") || Date.now() - lastKey < 4000 || isReading) setTimeout(reload, 1000);
    else location.reload();
  };
  setTimeout(reload, data.refresh * 1000);
}
