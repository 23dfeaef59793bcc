// Mean seconds of a rollout in each stage, as one bar per run.
// Defines: stageBars.

function stageBars(page) {
  const { runs } = page;
  const total = (run) => Object.values(run.stages).reduce((a, b) => a + b, 0);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.stages)))];
  const longest = Math.max(...runs.map(total));
  const unit = el("span", { class: "quiet" }, "mean seconds of a rollout in each stage");
  const legend = el("div", { class: "legend" }, names.map((name, k) => el("span", {}, dot(k), name)), unit);
  const bars = runs.map((run, i) => {
    const seconds = names.map((name) => `${name} ${duration(run.stages[name])}`);
    const track = el("div", { class: "track" }, names.map((name, k) => {
      const part = el("i", { title: seconds[k] });
      part.style.background = `var(--c${k % 8})`;
      part.style.width = `${(100 * (run.stages[name] || 0)) / (longest || 1)}%`;
      return part;
    }));
    const { trainer_idle, engine_idle } = run.headline;
    const idle = `  trainer idle ${percent(trainer_idle)}, engine idle ${percent(engine_idle)}`;
    const name = page.several ? [dot(i), run.name] : ["each rollout"];
    return el("div", { class: "bar" },
      el("span", {}, ...name, el("span", { class: "small" }, idle)),
      el("span", { class: "seconds" }, duration(total(run))),
      track,
      el("span", { class: "small" }, seconds.join(" · ")));
  });
  const overlap = "With data.lead, stages overlap: a rollout takes less time than their sum.";
  const note = runs.some((run) => run.overlaps) ? el("p", { class: "small", style: "margin-top:8px" }, overlap) : null;
  return el("div", { class: "bars", id: "stages" }, legend, bars, note);
}
