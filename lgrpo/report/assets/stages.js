// Mean seconds of a rollout in each stage, as one bar per run; and where the time of a run went, as a strip per run.
// Defines: stageBars, stageTimeline.

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
    const name = page.several ? [dot(colourOf(page, i)), run.name] : ["each rollout"];
    return el("div", { class: "bar" },
      el("span", {}, ...name, el("span", { class: "small" }, idle)),
      el("span", { class: "seconds" }, duration(total(run))),
      track,
      el("span", { class: "small" }, seconds.join(" · ")));
  });
  const overlap = "With data.overlap, stages overlap: a rollout takes less time than their sum.";
  const note = runs.some((run) => run.overlaps) ? el("p", { class: "small", style: "margin-top:8px" }, overlap) : null;
  return el("div", { class: "bars", id: "stages" }, legend, bars, note);
}

const TIMELINE_STAGES = ["sync", "generate", "score", "update", "validate"]; // as in timeline.py

// From left to right the time of a run; the height of a colour is the share of a stage in that part of it.
function stageTimeline(page) {
  const runs = page.runs.map((run, i) => [run, i]).filter(([run]) => run.timeline.length);
  if (!runs.length) return null;
  const total = ({ seconds }) => seconds.reduce((a, b) => a + b, 0);
  const length = (run) => run.timeline.reduce((sum, column) => sum + total(column), 0);
  const longest = Math.max(...runs.map(([run]) => length(run)));
  const unit = el("span", { class: "quiet" }, "share of the trainer's time, from the first rollout to the last");
  const legend = el("div", { class: "legend" }, TIMELINE_STAGES.map((name, k) => el("span", {}, dot(k), name)), unit);
  const strips = runs.map(([run, i]) => {
    const strip = el("div", { class: "strip" }, run.timeline.map((column) => timelineColumn(column, total(column) || 1)));
    strip.style.width = `${(100 * length(run)) / longest}%`;
    const name = page.several ? [dot(colourOf(page, i)), run.name] : ["over time"];
    return el("div", { class: "bar" }, el("span", {}, ...name), el("span", { class: "seconds" }, duration(length(run))),
      el("div", { class: "strips" }, strip));
  });
  return el("div", { class: "bars", id: "timeline" }, legend, strips);
}

function timelineColumn({ first, last, seconds }, total) {
  const shown = TIMELINE_STAGES.map((name, k) => `${name} ${duration(seconds[k])}`).join(", ");
  const title = `${first === last ? `rollout ${first}` : `rollouts ${first} to ${last}`}: ${shown}`;
  const column = el("span", { title }, seconds.map((value, k) => {
    const part = el("i");
    part.style.background = `var(--c${k})`;
    part.style.height = `${(100 * value) / total}%`;
    return part;
  }));
  column.style.flexGrow = total;
  return column;
}
