// The head of the page: name, task, buttons, and the headline metrics as tiles (one run) or as a table (several).
// Defines: showHead.

function showHead(page) {
  const { data, runs, several } = page, head = document.getElementById("head");
  const names = runs.map((run) => run.name).join(", ");
  document.title = `${names} · lgrpo`;
  const brand = el("span", {}, el("b", {}, "lgrpo"), several ? ` · ${runs.length} runs` : " · run");
  const tools = [
    data.refresh ? liveButton(page) : null,
    data.groups.length ? groupButton(page) : null,
    smoothingMenu(page),
    page.hasClock ? axisButton(page) : null,
    themeButton(page),
  ];
  const shared = (values) => (new Set(values).size === 1 ? values[0] : null);
  const task = shared(runs.map((run) => run.task)), model = shared(runs.map((run) => run.model));
  const subtitle = [task, model, several ? null : schedule(runs[0])].filter(Boolean).join(" · ");
  head.append(
    el("div", { class: "brand" }, brand, el("span", { class: "tools" }, tools)),
    el("h1", {}, names),
    el("p", { class: "sub" }, subtitle),
    ...(several ? [runChips(page), summaryTable(page)] : [tiles(page)]),
  );
  const notes = runs.flatMap((run) => run.notes.map((note) => (several ? `${run.name}: ${note}` : note)));
  const items = [...data.notes, ...notes].map((note) => el("li", {}, escaped(note)));
  if (items.length) head.append(el("ul", { class: "notes", id: "notes" }, items));
}

function schedule({ sync, sync_period: period, reuse, num_prompts: prompts, group_size: size }) {
  const v = period ?? (sync && sync !== "WeightSync" ? sync : "∞");
  return isMissing(reuse) ? "" : `(v, i) = (${v}, ${reuse}), ${prompts} × ${size} completions`;
}

function runChips(page) {
  return el("div", { class: "chips" }, page.drawn.map((run, i) => {
    const mark = () => chip.classList.toggle("off", page.hidden.has(i));
    const chip = el("button", { class: "pill chip on", title: "Show or hide this run", onclick: () => {
      if (!page.hidden.delete(i)) page.hidden.add(i);
      remember("hide", [...page.hidden].join(","));
      mark();
      redrawCharts(page);
      refreshCompletions(page);
    } }, dot(i), run.name);
    mark();
    return chip;
  }));
}

const gain = (headline) =>
  (headline.pass_last === null ? MISSING : `${fixed(headline.pass_first, 2)} → ${fixed(headline.pass_last, 2)}`);
const margin = ({ pass_error: error }) => (error === null ? MISSING : `± ${fixed(1.96 * error, 3)}`);
const isUnfinished = (run) => run.planned_steps && run.num_steps < run.planned_steps;

// Columns of the table that sums up several runs: [title, value of a run].
const SUMMARY_COLUMNS = [
  ["pass@1", (run) => gain(run.headline)],
  ["95%", (run) => margin(run.headline)],
  ["best", (run) => fixed(run.headline.pass_best, 2)],
  ["reward", (run) => fixed(run.headline.reward, 3)],
  ["v", (run) => run.sync_period ?? run.sync ?? MISSING],
  ["i", (run) => run.reuse ?? MISSING],
  ["syncs", (run) => whole(run.syncs.version.length)],
  ["largest lag", (run) => number(run.headline.lag_max)],
  ["steps", (run) => whole(run.num_steps) + (isUnfinished(run) ? ` of ${whole(run.planned_steps)}` : "")],
  ["trainer idle", (run) => percent(run.headline.trainer_idle)],
  ["training time", (run) => duration(run.headline.seconds)],
];

function summaryTable(page) {
  const { runs } = page;
  const severalTasks = new Set(runs.map((run) => run.task)).size > 1;
  const rows = runs.map((run, i) => {
    const task = severalTasks ? el("div", { class: "small" }, run.task || "unknown task") : null;
    const cells = SUMMARY_COLUMNS.map(([, value]) => el("td", { class: "num" }, String(value(run))));
    return el("tr", {}, el("td", {}, dot(colourOf(page, i)), run.name, task), cells);
  });
  const titles = [el("th", {}, "run"), ...SUMMARY_COLUMNS.map(([title]) => el("th", { class: "num" }, title))];
  const table = el("table", { id: "summary" }, el("thead", {}, el("tr", {}, titles)), el("tbody", {}, rows));
  return el("div", { class: "scroller", style: "margin-top:18px" }, table);
}

// The headline metrics of one run: label, value, and a line below it.
function tiles({ data, runs: [run] }) {
  const { headline } = run;
  const best = headline.pass_error === null ? "" : `${margin(headline)}, best ${fixed(headline.pass_best, 2)}`;
  const contents = [
    ["pass@1, held out", gain(headline), best],
    ["reward", fixed(headline.reward, 3), `mean of the last ${plural(headline.reward_over, "rollout")}`],
    ["optimizer steps", whole(run.num_steps), progress(run, data.made)],
    ["syncs", whole(run.syncs.version.length), `largest lag ${number(headline.lag_max)}`],
    ["trainer idle", percent(headline.trainer_idle), `engine ${percent(headline.engine_idle)}`],
    ["training time", duration(headline.seconds), "waiting and updating"],
  ];
  return el("div", { class: "tiles", id: "tiles" }, contents.map(([label, value, more]) => el("div", { class: "tile" },
    el("div", { class: "label" }, label),
    el("div", { class: "value" }, value),
    el("div", { class: "more" }, more || "\u00a0"))));
}

function progress({ planned_steps: planned, num_steps: steps, written }, now) {
  if (planned !== null && steps >= planned) return `of ${whole(planned)}: complete`;
  const when = now - written < 90 ? "just now" : `${duration(now - written)} before this page`;
  return `${planned ? `of ${whole(planned)}; ` : ""}last written ${when}`;
}
