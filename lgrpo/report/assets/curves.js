// The curves of a chart as points on the current axis.
// Defines: curvesOf.

const SMOOTHED = " (smoothed)";

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

// Upper and lower limit of the 95% interval, where the run logged a standard error.
function bandOf(page, run, metric) {
  const error = run.series[`${metric}_stderr`];
  if (!error) return null;
  const widths = new Map(error[0].map((step, i) => [step, error[1][i]]));
  const [steps, values] = run.series[metric];
  return [1, -1].map((sign) => onAxis(page, run, [steps, steps.map((step, i) => {
    const width = widths.get(step);
    return values[i] === null || isMissing(width) ? null : values[i] + sign * 1.96 * width;
  })]));
}

// The curves of the visible runs. With several runs, a chart of several metrics shows the chosen one of them.
function curvesOf(page, chart, chosen) {
  const metrics = Object.entries(chart.lines);
  const curves = [];
  for (const i of page.visible()) {
    const run = page.runs[i];
    metrics.forEach(([metric, label], k) => {
      if (!run.series[metric]) return;
      const isSmooth = metric.endsWith(SMOOTHED);
      const hasSmooth = metrics.some(([other]) => other === metric + SMOOTHED);
      if (page.several && !isSmooth && !hasSmooth && metrics.length > 1 && metric !== chosen) return;
      curves.push({
        run,
        metric,
        label: page.several ? run.name : label,
        colour: page.several ? i : isSmooth || hasSmooth ? 0 : k,
        faint: hasSmooth && Boolean(run.series[metric + SMOOTHED]),
        strong: isSmooth,
        points: onAxis(page, run, run.series[metric]),
        band: page.several && hasSmooth ? null : bandOf(page, run, metric),
      });
    });
  }
  return curves;
}
