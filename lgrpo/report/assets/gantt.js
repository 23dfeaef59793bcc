// What ran when during some rollouts of each run: a lane of the engine above a lane of the trainer, on one clock.
// Defines: ganttCharts.

const GANTT_COLOURS = { sync: 0, generate: 1, score: 2, update: 3, validate: 4 }; // as in the strip of stages.js

function ganttCharts(page) {
  const runs = page.runs.map((run, i) => [run, i]).filter(([run]) => run.gantt);
  if (!runs.length) return null;
  const legend = el("div", { class: "legend" },
    Object.entries(GANTT_COLOURS).map(([name, k]) => el("span", {}, dot(k), name)),
    el("span", {}, el("i", { class: "hatched" }), "trainer waits"),
    el("span", { class: "quiet" }, "engine and trainer on one clock; numbers are rollouts"));
  const blank = "Blank: the engine is idle, or the trainer does other work, such as logging and checkpoints.";
  return el("div", { class: "bars", id: "gantt" }, legend, runs.map(([run, i]) => ganttChart(page, run, i)),
    el("p", { class: "small", style: "margin-top:8px" }, blank));
}

function ganttChart(page, run, i) {
  const { boxes, begin, end } = run.gantt;
  const lane = (stages, kind = "") => el("div", { class: `lane ${kind}` },
    boxes.filter((box) => stages.includes(box.stage)).map((box) => ganttBox(box, run.gantt)));
  const name = page.several ? [dot(colourOf(page, i)), run.name] : ["what ran when"];
  return el("div", { class: "bar" }, el("span", {}, ...name), el("span", { class: "seconds" }, duration(end - begin)),
    el("div", { class: "scroll", style: "grid-column: 1 / -1" }, el("div", { class: "lanes" },
      el("span", {}, "engine"), lane(["generate", "idle"]), lane(["score"], "thin"),
      el("span", {}, "trainer"), lane(["wait", "sync", "update", "validate"]), ganttAxis(run.gantt))),
    el("span", { class: "small", style: "grid-column: 1 / -1" }, ganttSentence(run.gantt)));
}

function ganttBox({ stage, first, last, start, end, parts }, chart) {
  const inside = (seconds) => Math.min(Math.max(seconds, chart.begin), chart.end) - chart.begin;
  const share = (seconds) => (100 * inside(seconds)) / (chart.end - chart.begin);
  const rollouts = first === last ? `rollout ${first}` : `rollouts ${first} to ${last}`;
  const waited = Object.entries(parts).filter(([, s]) => s > 0.001).map(([name, s]) => `${name} ${duration(s)}`);
  const title = {
    idle: `engine idle ${duration(end - start)} until it sampled rollout ${first}`,
    wait: `rollout ${first}: the trainer waited for ${waited.join(", ") || "less than 1 ms"}`,
    sync: `before sampling rollout ${first}: sync ${duration(end - start)}`,
    validate: `after rollout ${first}: validate ${duration(end - start)}`,
  }[stage] ?? `${rollouts}: ${stage} ${duration(end - start)}`;
  const label = first === last ? first : `${first}–${last}`;
  const box = el("i", { class: stage, title }, ["generate", "update"].includes(stage) ? el("b", {}, label) : null);
  if (stage in GANTT_COLOURS) box.style.background = `var(--c${GANTT_COLOURS[stage]})`;
  box.style.left = `${share(start)}%`;
  box.style.width = `${share(end) - share(start)}%`;
  return box;
}

// Five times, in seconds since the beginning of the fit.
function ganttAxis({ begin, end }) {
  const digits = end - begin < 4 ? 2 : end - begin < 40 ? 1 : 0;
  return el("div", { class: "axis" }, [0, 0.25, 0.5, 0.75, 1].map((share) => {
    const tick = el("span", {}, `${fixed(begin + share * (end - begin), digits)} s`);
    tick.style.left = `${100 * share}%`;
    return tick;
  }));
}

function ganttSentence({ first, last, num_rollouts }) {
  const isWhole = last - first + 1 === num_rollouts;
  const shown = isWhole ? "All rollouts are shown" : `Rollouts ${first} to ${last} of ${whole(num_rollouts)} are shown`;
  return `${shown}, in seconds since the fit began or was resumed.`;
}
