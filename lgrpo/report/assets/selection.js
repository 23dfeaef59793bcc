// Which runs are shown, alone or grouped by settings, against which axis, and which range of it.
// Defines: createPage (the object that the other modules pass around), isHidden, colourOf, groupButton, isTimeAxis,
// axisButton, xOf, setZoom, zoomOutButton.

function createPage(data) {
  const { runs, groups } = data;
  const drawn = groups.length && saved.get("by") !== "run" ? groups : runs;
  const hidden = new Set((saved.get("hide") || "").split(",").filter(Boolean).map(Number));
  const range = (saved.get("zoom") || "").split("..").map(Number);
  return {
    data,
    runs,
    several: runs.length > 1,
    drawn, // what the charts show: runs, or groups of runs that differ by their seed
    compares: drawn.length > 1,
    hidden, // indices of drawn
    visible: () => drawn.map((_, i) => i).filter((i) => !hidden.has(i)),
    hasClock: runs.every((run) => run.clock[0].length > 1),
    zoom: saved.get("zoom") && range.length === 2 && !range.some(Number.isNaN) ? range : null,
    cards: [], // one per chart, see charts.js
    completions: null, // the table, see completions.js
  };
}

// Whether a run is hidden, by itself or with its group.
const isHidden = (page, run) =>
  page.drawn.some((item, i) => page.hidden.has(i) && (item.members ? item.members.includes(run) : i === run));

// Colour of a run: its own, or that of its group.
const colourOf = (page, run) => (page.drawn === page.runs ? run : page.drawn.findIndex((g) => g.members.includes(run)));

function groupButton(page) {
  const isGrouped = page.drawn !== page.runs;
  return el("button", { class: "pill", id: "group", title: "Draw each run, or means over seeds", onclick: () => {
    remember("by", isGrouped ? "run" : "");
    remember("hide", "");
    location.reload();
  } }, isGrouped ? "mean over seeds" : "each run");
}

const isTimeAxis = (page) => page.hasClock && saved.get("x") === "time";

function axisButton(page) {
  const label = () => (isTimeAxis(page) ? "by training time" : "by step");
  const button = el("button", { class: "pill", id: "axis", title: "Horizontal axis of the curves", onclick: () => {
    remember("x", isTimeAxis(page) ? "" : "time");
    setZoom(page, null);
    button.textContent = label();
    redrawCharts(page);
  } }, label());
  return button;
}

// Position of an optimizer step on the axis: the step, or the seconds of training before it, interpolated.
function xOf(page, run, step) {
  if (!isTimeAxis(page)) return step;
  const [steps, seconds] = run.clock;
  let low = 0, high = steps.length - 1;
  if (step <= steps[0]) return seconds[0];
  if (step >= steps[high]) return seconds[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return seconds[low] + ((step - steps[low]) / (steps[high] - steps[low])) * (seconds[high] - seconds[low]);
}

function setZoom(page, range) {
  page.zoom = range;
  remember("zoom", range ? range.map((x) => Number(x.toPrecision(6))).join("..") : "");
  document.getElementById("unzoom").hidden = !range;
  for (const card of page.cards) card.plot?.setData(card.plot.data);
}

const zoomOutButton = (page) =>
  el("button", { class: "pill", id: "unzoom", hidden: !page.zoom, onclick: () => setZoom(page, null) }, "whole run");
