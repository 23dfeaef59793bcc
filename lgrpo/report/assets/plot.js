// One chart drawn by uPlot: curves, bands, marks of syncs, a legend that follows the cursor.
// Defines: drawChart, openCharts (what was drawn, by "section / title").

const openCharts = (window.pageCharts = new Map());

function drawChart(page, card) {
  const { chart, box, legend } = card;
  card.plot?.destroy();
  box.replaceChildren();
  legend.replaceChildren();
  const curves = curvesOf(page, chart, card.chosen).map((curve) => (card.isLog ? onlyPositive(curve) : curve));
  if (!curves.length) {
    box.append(el("p", { class: "small" }, "No visible run has these metrics."));
    card.plot = null;
    return;
  }
  card.note.textContent = noteOf(card, curves);
  const { table, series, bands } = plotColumns(curves);
  const updateLegend = fillLegend(page, legend, curves);
  const zoomTo = (u) => {
    const { left, width } = u.select;
    if (width > 4) setZoom(page, [u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  };
  const xRange = (u, low, high) => page.zoom || (low === high ? [low - 1, high + 1] : [low, high]);
  card.plot = new uPlot({
    width: Math.max(120, box.clientWidth),
    height: card.height,
    legend: { show: false },
    series,
    bands,
    padding: [8, 16, 0, 0],
    scales: { x: { time: false, range: xRange }, y: yScale(card) },
    axes: axesOf(page),
    cursor: cursorOf(page),
    hooks: {
      drawClear: [(u) => { if (chart.show_syncs) drawSyncs(page, u); }],
      setCursor: [updateLegend],
      setSelect: [zoomTo],
    },
  }, table, box);
  updateLegend(card.plot);
  card.built = true;
  openCharts.set(`${card.section} / ${chart.title}`, { plot: card.plot, curves });
}

function noteOf({ chart, isLog }, curves) {
  const windows = [...new Set(curves.filter((curve) => curve.strong).map((curve) => curve.window))];
  const overSeeds = curves.some((curve) => curve.band && curve.run.members?.length > 1);
  return [
    chart.note,
    curves.some((curve) => curve.band) ? `The band is the 95% interval${overSeeds ? " over seeds" : ""}.` : "",
    windows.length ? `Smoothed: mean of the last ${windows.join(" or ")} values.` : "",
    isLog && curves.some((curve) => curve.lost) ? "Values of 0 or below are left out." : "",
  ].filter(Boolean).join(" ");
}

// A logarithmic axis cannot show values of 0 or below.
function onlyPositive(curve) {
  const positive = ([xs, ys]) => [xs, ys.map((y) => (y > 0 ? y : null))];
  const lost = curve.points[1].some((y) => y !== null && y <= 0);
  return { ...curve, lost, points: positive(curve.points), band: curve.band && curve.band.map(positive) };
}

function yScale({ chart, isLog }) {
  if (!isLog) return { range: (u, low, high) => yRange(chart, low, high) };
  return { distr: 3, log: 10, range: (u, low, high) => (low > 0 ? uPlot.rangeLog(low, high, 10, false) : [0.1, 10]) };
}

// uPlot's aligned columns, with the options of each. A band takes the two columns after its curve's.
function plotColumns(curves) {
  const tables = [], series = [{}], bands = [];
  for (const curve of [...curves].reverse()) { // the first curve is drawn last, on top
    const stroke = palette(curve.colour);
    const hasDots = curve.points[0].length <= 60 && !curve.strong && !curve.faint;
    curve.column = series.length;
    tables.push(curve.points);
    series.push({
      label: curve.label,
      stroke,
      width: curve.strong ? 2.2 : curve.faint ? 1 : 1.6,
      alpha: curve.faint ? 0.38 : 1,
      spanGaps: true,
      points: { show: hasDots, size: 5, fill: colour("--card"), width: 1.4 },
    });
    if (curve.band) {
      tables.push(...curve.band);
      bands.push({ series: [series.length, series.length + 1], fill: `${stroke}${curve.faint ? "1c" : "26"}` });
      const isOverSeeds = curve.run.members?.length > 1; // with two seeds wider than any chart: it may be cut off
      const limit = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false }, auto: !isOverSeeds };
      series.push({ ...limit }, { ...limit });
    }
  }
  return { table: tables.length === 1 ? tables[0] : uPlot.join(tables), series, bands };
}

// Limits of the vertical axis: the values with a margin, extended to the limits the chart asks for.
function yRange({ axis_min: axisMin, axis_max: axisMax }, low, high) {
  if (axisMin !== null) low = Math.min(axisMin, low ?? 0);
  if (axisMax !== null) high = Math.max(axisMax, high ?? 1);
  if (low === null || high === null) return [0, 1];
  if (low === high) {
    const pad = Math.abs(low) * 0.1 || (axisMin === 0 ? 1 : 0.1);
    return [axisMin === 0 && low === 0 ? 0 : low - pad, high + pad];
  }
  const pad = (high - low) * 0.06;
  return [low === axisMin ? low : low - pad, high === axisMax ? high : high + pad];
}

function axesOf(page) {
  const font = `11px ${getComputedStyle(document.body).fontFamily}`;
  const style = { stroke: colour("--faint"), font, ticks: { show: false } };
  const time = (t) => (t === 0 ? "0" : duration(t));
  const step = (t) => (Number.isInteger(t) ? whole(t) : "");
  const label = isTimeAxis(page) ? time : step;
  const grid = { stroke: colour("--grid"), width: 1 };
  return [
    { ...style, grid: { show: false }, size: 26, space: 70, values: (u, ticks) => ticks.map(label) },
    { ...style, grid, size: 52, space: 34, values: (u, ticks) => ticks.map((t) => (isMissing(t) ? "" : number(t))) },
  ];
}

function cursorOf(page) {
  return {
    sync: { key: "page", setSeries: false, scales: ["x", null] },
    dataIdx: nearestValue,
    points: { size: 7, width: 0, fill: (u, s) => u.series[s].stroke(u, s), stroke: "transparent" },
    drag: { x: true, y: false, setScale: true },
    bind: { dblclick: () => () => { setZoom(page, null); return null; } },
  };
}

// Index of the value of column s nearest to an index at which the column may be empty.
function nearestValue(u, s, index) {
  const ys = u.data[s];
  if (!isMissing(ys[index])) return index;
  for (let d = 1; d < ys.length; d++) {
    if (index - d >= 0 && !isMissing(ys[index - d])) return index - d;
    if (index + d < ys.length && !isMissing(ys[index + d])) return index + d;
  }
  return index;
}

// Fill the legend, and return the function that updates its values: at the cursor, or the last of each curve.
function fillLegend(page, legend, curves) {
  const values = curves.map((curve) => {
    const value = el("b"), mark = dot(curve.colour);
    if (curve.faint) mark.style.opacity = 0.4;
    if (curve.isListed) legend.append(el("span", {}, mark, `${curve.label} `, value));
    return value;
  });
  const position = el("span");
  legend.append(position);
  return (u) => {
    const hovered = !isMissing(u.cursor.idx) && u.cursor.left >= 0;
    curves.forEach((curve, k) => {
      const ys = u.data[curve.column];
      const index = nearestValue(u, curve.column, hovered ? u.cursor.idx : ys.length - 1);
      const upper = curve.band && !curve.faint ? u.data[curve.column + 1][index] : null;
      const margin = isMissing(upper) ? "" : ` ± ${number(Number((upper - ys[index]).toPrecision(2)))}`;
      values[k].textContent = number(ys[index]) + margin;
    });
    const x = hovered ? u.data[0][u.cursor.idx] : null;
    position.textContent = x === null ? "" : isTimeAxis(page) ? `at ${duration(x)}` : `at step ${whole(x)}`;
  };
}

// Mark the syncs of the visible runs. One run with few syncs: dashed lines through the chart; otherwise short strokes
// at the bottom, those of several runs in one row each.
function drawSyncs(page, u) {
  const { ctx, bbox } = u, { min, max } = u.scales.x;
  const ratio = devicePixelRatio || 1, bottom = bbox.top + bbox.height;
  ctx.save();
  ctx.lineWidth = ratio;
  page.visible().forEach((i, row) => {
    const run = page.drawn[i];
    const logged = run.syncs.step.filter((step) => step !== null);
    const xs = logged.map((step) => xOf(page, run, step)).filter((x) => x >= min && x <= max);
    const isDense = xs.length > bbox.width / ratio / 7;
    ctx.strokeStyle = page.compares ? palette(i) : colour("--sync");
    ctx.globalAlpha = page.compares ? 0.55 : 1;
    ctx.setLineDash(isDense || page.compares ? [] : [2 * ratio, 3 * ratio]);
    ctx.beginPath();
    for (const x of xs) {
      const pixel = Math.round(u.valToPos(x, "x", true)) + 0.5;
      const top = page.compares ? bottom - (5 + 5 * row) * ratio : isDense ? bottom - 6 * ratio : bbox.top;
      ctx.moveTo(pixel, top);
      ctx.lineTo(pixel, page.compares ? top + 4 * ratio : bottom);
    }
    ctx.stroke();
  });
  ctx.restore();
}
