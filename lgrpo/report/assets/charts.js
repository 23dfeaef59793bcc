// The sections of charts. Which charts there are is decided in charts.py. A chart is drawn when it comes into view, the
// others when the browser is idle, so that prints and screenshots of the whole page show all.
// Defines: showCharts, redrawCharts.

const redrawCharts = (page) => page.cards.filter((card) => card.built).forEach((card) => drawChart(page, card));

function showCharts(page) {
  const onView = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (isIntersecting && !target.card.built) drawChart(page, target.card);
    }
  }, { rootMargin: "400px" });
  const onResize = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const { plot, height } = target.card, { width } = contentRect;
      if (plot && Math.abs(plot.width - width) > 1) plot.setSize({ width, height });
    }
  });
  page.data.sections.forEach((_, index) => showChartSection(page, index));
  for (const card of page.cards) {
    onView.observe(card.box);
    onResize.observe(card.box);
  }
  drawWhenIdle(page);
  redrawForPrint(page);
}

function drawWhenIdle(page) {
  const next = page.cards.find((card) => !card.built);
  if (!next) return;
  const draw = () => { if (!next.built) drawChart(page, next); drawWhenIdle(page); };
  if (window.requestIdleCallback) requestIdleCallback(draw, { timeout: 500 }); else setTimeout(draw, 20);
}

// Charts are drawn again for paper: in light colours, in two columns.
function redrawForPrint(page) {
  const draw = (isPrinting) => {
    document.documentElement.classList.toggle("printing", isPrinting);
    applyTheme();
    for (const card of page.cards) drawChart(page, card);
  };
  addEventListener("beforeprint", () => draw(true));
  addEventListener("afterprint", () => draw(false));
}

function sectionNote(page, title) {
  if (title === "Learning") return "Drag over a chart to zoom all of them, double-click to zoom out.";
  if (title !== "Off-policy" || !page.runs.some((run) => run.syncs.step.length)) return "";
  return "Marks show syncs: dashed lines if there are few, short ticks at the bottom if there are many.";
}

function showChartSection(page, index) {
  const { title, charts } = page.data.sections[index];
  const node = addSection(title, sectionNote(page, title));
  if (title === "Time") node.append(stageBars(page), stageTimeline(page) ?? "", ganttCharts(page) ?? "");
  const constant = title === "Learning" ? [] : charts.filter((chart) => isConstant(page, chart));
  const grid = el("div", { class: title === "Learning" ? "charts large" : "charts" });
  node.append(grid);
  if (constant.length) {
    const values = constant.flatMap((chart) => Object.keys(chart.lines).map((name) => constantValue(page, name)));
    node.append(el("p", { class: "small still" }, `Constant: ${values.join(", ")}.`));
  }
  charts.forEach((chart, k) => {
    if (!constant.includes(chart)) grid.append(chartCard(page, chart, title, `m${index}.${k}`));
  });
}

// Metrics with one value for the whole of every run are listed as text instead of being drawn.
const isConstant = (page, chart) => Object.keys(chart.lines).every((name) => {
  const values = page.runs.flatMap((run) => run.series[name]?.[1] || []);
  return values.length > 2 * page.runs.length && values.every((value) => value !== null && value === values[0]);
});
const constantValue = (page, name) => `${name} ${number(page.runs.find((run) => run.series[name]).series[name][1][0])}`;

function chartCard(page, chart, section, key) {
  const isLarge = section === "Learning";
  const card = {
    chart,
    section,
    key,
    chosen: saved.get(key) || Object.keys(chart.lines)[0],
    height: isLarge ? 250 : 196,
    box: el("div", { class: "plot" }),
    note: el("p", { class: "note" }, chart.note),
    legend: el("div", { class: "legend" }),
    plot: null,
    built: false,
  };
  card.box.card = card;
  card.box.style.height = `${card.height}px`;
  page.cards.push(card);
  const top = el("div", { class: "top" }, el("h3", {}, chart.title), 
    el("div", { class: "choose" }, metricButtons(page, card, key), logButton(page, card)));
  return el("div", { class: "chart" }, top, card.legend, card.box, card.note);
}

// With several runs, a chart of several metrics shows one at a time.
function metricButtons(page, card, key) {
  const { lines } = card.chart, metrics = Object.keys(lines);
  if (!page.compares || metrics.length === 1) return [];
  const mark = () => buttons.forEach((button, k) => button.classList.toggle("on", metrics[k] === card.chosen));
  const buttons = metrics.map((metric) => el("button", { onclick: () => {
    card.chosen = metric;
    remember(key, metric === metrics[0] ? "" : metric);
    mark();
    drawChart(page, card);
  } }, lines[metric]));
  mark();
  return buttons;
}

// Charts with a logarithmic axis, by key, in the page's address.
const logKeys = () => new Set((saved.get("log") || "").split(",").filter(Boolean));

function logButton(page, card) {
  const mark = () => button.classList.toggle("on", card.isLog);
  const button = el("button", { class: "log", title: "Logarithmic axis", onclick: () => {
    const keys = logKeys();
    if (!keys.delete(card.key)) keys.add(card.key);
    remember("log", [...keys].join(","));
    card.isLog = !card.isLog;
    mark();
    drawChart(page, card);
  } }, "log");
  card.isLog = logKeys().has(card.key);
  mark();
  return button;
}
