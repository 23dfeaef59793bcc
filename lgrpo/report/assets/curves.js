// The curves of a chart as points on the current axis.
// Defines: curvesOf, smoothingMenu.

const SMOOTHED = " (smoothed)";
const MIN_SMOOTHED = 20; // shorter curves are not smoothed

// [steps, values] as [xs, ys]; steps after the last time that was logged are left out.
function onAxis(page, run, [steps, values]) {
  const xs = [], ys = [];
  steps.forEach((step, i) => {
    const x = xOf(page, run, step);
    if (xs.length && x <= xs[xs.length - 1]) return;
    xs.push(x);
    ys.push(values[i]);
  });
  return [xs, ys];
}

// Upper and lower limit of the 95% interval of a curve, where the run has a standard error.
function bandOf(page, run, metric, [steps, values], window) {
  const error = run.series[`${metric}_stderr`];
  if (!error) return null;
  const [errorSteps, errors] = window > 1 ? smoothed(run, `${metric}_stderr`, window) : error;
  const widths = new Map(errorSteps.map((step, i) => [step, errors[i]]));
  return [1, -1].map((sign) => onAxis(page, run, [steps, steps.map((step, i) => {
    const width = widths.get(step);
    return values[i] === null || isMissing(width) ? null : values[i] + sign * 1.96 * width;
  })]));
}

// Number of logged values that a smoothed curve averages; 1 if curves are drawn as logged.
const windowOf = (chart, run) => Number(saved.get("smooth")) || (chart.is_smoothed ? run.smoothing_window : 1);

// Mean of each value and those before it. A curve that lost points was smoothed before it lost them.
function smoothed(run, metric, window) {
  const means = run.smoothed[metric];
  if (means) return means[window] || means[run.smoothing_window];
  const [steps, values] = run.series[metric], kept = [];
  return [steps, values.map((value) => {
    if (value === null) return null;
    kept.push(value);
    if (kept.length > window) kept.shift();
    return kept.reduce((a, b) => a + b, 0) / kept.length;
  })];
}

// The curves of what is visible. With several runs, a chart of several metrics shows the chosen one of them.
function curvesOf(page, chart, chosen) {
  const metrics = Object.entries(chart.lines), isSingle = metrics.length === 1;
  const curves = [];
  for (const i of page.visible()) {
    const run = page.drawn[i];
    metrics.forEach(([metric, label], k) => {
      const points = run.series[metric];
      if (!points || (page.compares && !isSingle && metric !== chosen)) return;
      const window = points[0].length < MIN_SMOOTHED ? 1 : windowOf(chart, run);
      const shared = { run, colour: page.compares ? i : k, label: page.compares ? run.name : label };
      const isFaint = window > 1, hasOwnBand = !isFaint || !(page.compares || run.members);
      curves.push({
        ...shared,
        metric,
        faint: isFaint,
        isListed: !isFaint || (isSingle && !page.compares),
        points: onAxis(page, run, points),
        band: hasOwnBand ? bandOf(page, run, metric, points, 1) : null,
      });
      if (!isFaint) return;
      const smooth = smoothed(run, metric, window);
      curves.push({
        ...shared,
        label: isSingle && !page.compares ? "smoothed" : shared.label,
        metric: metric + SMOOTHED,
        strong: true,
        window,
        isListed: true,
        points: onAxis(page, run, smooth),
        band: run.members?.length > 1 ? bandOf(page, run, metric, smooth, window) : null,
      });
    });
  }
  return curves;
}

function smoothingMenu(page) {
  const choices = [["", "default smoothing"], ["1", "no smoothing"]];
  for (const window of page.data.smoothing_windows) choices.push([String(window), `mean of ${window}`]);
  const options = choices.map(([value, text]) => el("option", { value }, text));
  const menu = el("select", { class: "pill", id: "smooth", title: "Smoothing of all curves", onchange: () => {
    remember("smooth", menu.value);
    redrawCharts(page);
  } }, options);
  menu.value = saved.get("smooth") || "";
  return menu;
}
