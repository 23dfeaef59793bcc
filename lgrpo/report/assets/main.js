// Decompresses the data and shows it. The last of the modules: it runs what the others define.

async function unpack() {
  const compressed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function show(data) {
  const page = createPage(data);
  showHead(page);
  document.getElementById("page").replaceChildren();
  showCharts(page);
  showSyncs(page);
  showCompletions(page);
  showSettings(page);
  showNavigation(page);
  showFooter(page);
  keepScrollPosition(page);
  reloadPeriodically(page);
  document.documentElement.dataset.ready = "yes";
}

applyTheme();
unpack().then(show).catch((error) => {
  const isOld = typeof DecompressionStream === "undefined";
  const message = isOld
    ? "This browser is too old: the page needs one from 2023 or later."
    : `The page could not be drawn: ${error.message}`;
  document.getElementById("page").replaceChildren(el("p", {}, message));
  throw error;
});
