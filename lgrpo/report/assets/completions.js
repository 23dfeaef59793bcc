// The table of completions: search, filters, whole texts.
// To add a column, add it to COMPLETION_COLUMNS; page_data.py sends every number of completions.jsonl.
// Defines: showCompletions, refreshCompletions.

// Numeric columns, each with a filter. name: field of completions.jsonl; example: placeholder of the filter;
// text: (value, field) -> text of the cell, where field(name) is another value of the same row; optional: hidden if no
// completion has a value.
const COMPLETION_COLUMNS = [
  { name: "rollout" },
  { name: "version" },
  { name: "lag", example: "0..4" },
  { name: "reward", example: ">0.5", text: (value) => (value === null ? "late" : number(value)) },
  { name: "advantage", text: (value, field) => fixed(value, 3) + (field("live") === false ? " ∅" : "") },
  { name: "dropped", optional: true, text: (value) => (value === null ? "" : number(value)) },
];

const refreshCompletions = (page) => page.completions?.update(true);

function showCompletions(page) {
  const { several, runs } = page, rows = completionRows(page.data.completions);
  if (!rows.count) return;
  const shownColumns = COMPLETION_COLUMNS.filter(({ name, optional }) => !optional || rows.has(name));
  const section = addSection("Completions", completionsNote(page, rows.count));
  const runOptions = [["", "all"], ...runs.map((run, i) => [String(i), run.name])];
  const liveOptions = [["", "any"], ["yes", "yes"], ["no", "masked"]];
  const filters = createFilters({
    numeric: shownColumns,
    selects: [
      ...(several ? [{ name: "run", label: "run", options: runOptions }] : []),
      { name: "live", label: "trains", options: liveOptions },
    ],
    onChange: () => table.update(true),
  });
  const table = createTable({
    id: "completions",
    count: rows.count,
    size: 20,
    columns: completionColumns(page, rows, filters, shownColumns),
    detail: (row) => completionDetail(rows, filters, row),
    order: (key) => (row) => (key === "prompt" ? rows.prompt(row) : rows.field(row, key)),
  });
  table.keep = (row) => matches(page, rows, filters, row);
  section.append(filters.node, table.node);
  if (rows.someMasked) {
    section.append(el("p", { class: "small", style: "margin-top:6px" }, "∅: masked, without a loss."));
  }
  table.update();
  page.completions = table;
}

// Access to the columns of the data by row. Texts in lower case, for the search, are made on first use.
function completionRows({ prompts, columns }) {
  let lowerPrompts = null, lowerCompletions = null;
  return {
    count: columns.run.length,
    someMasked: Boolean(columns.live?.some((flag) => flag === false)),
    field: (row, name) => columns[name]?.[row] ?? null,
    has: (name) => Boolean(columns[name]?.some((value) => value !== null)),
    prompt: (row) => prompts[columns.prompt[row]],
    group: (row) => `${columns.run[row]}.${columns.rollout[row]}.${columns.prompt[row]}`,
    contains: (row, query) => {
      lowerPrompts ??= prompts.map((text) => text.toLowerCase());
      lowerCompletions ??= columns.completion.map((text) => text.toLowerCase());
      return lowerPrompts[columns.prompt[row]].includes(query) || lowerCompletions[row].includes(query);
    },
  };
}

function completionsNote({ runs, several }, count) {
  const total = runs.reduce((sum, run) => sum + run.num_completions, 0);
  if (total === count) {
    return `All ${plural(count, "completion")} of the ${several ? "runs" : "run"}. Click a row to read it in full.`;
  }
  return `${whole(count)} of the ${whole(total)} completions on disk: whole rollouts at regular intervals, ` +
    "to limit the size of the page. Click a row to read it in full.";
}

function completionColumns(page, rows, filters, shownColumns) {
  const { runs, several } = page;
  const numeric = shownColumns.map(({ name, text = number }) => ({
    title: name,
    key: name,
    numeric: true,
    cell: (row) => text(rows.field(row, name), (other) => rows.field(row, other)),
  }));
  const { field } = rows;
  const shown = (text) => escaped(excerpt(text, filters.query), filters.query);
  const runCell = (row) => [dot(colourOf(page, field(row, "run"))), runs[field(row, "run")].name];
  return [
    ...(several ? [{ title: "run", key: "run", kind: "name", cell: runCell }] : []),
    ...numeric,
    { title: "prompt", key: "prompt", kind: "text", cell: (row) => shown(rows.prompt(row)) },
    { title: "completion", key: "completion", kind: "text", cell: (row) => shown(field(row, "completion")) },
  ];
}

const completionDetail = (rows, filters, row) => [
  el("div", { class: "small" }, "prompt"),
  el("div", { class: "full" }, escaped(rows.prompt(row), filters.query)),
  el("div", { class: "small" }, completionTitle(rows.field(row, "dropped"))),
  el("div", { class: "full" }, escaped(rows.field(row, "completion"), filters.query)),
  ...(rows.field(row, "notes")
    ? [
      el("div", { class: "small" }, "notes of the reward"),
      el("div", { class: "full" }, escaped(rows.field(row, "notes"), filters.query)),
    ]
    : []),
  el("button", { class: "pill", onclick: () => filters.showGroup(rows.group(row)) }, "show its siblings"),
];

const completionTitle = (dropped) =>
  dropped === null ? "completion" : `completion (later turns did not see ${plural(dropped, "observation")})`;

function matches(page, rows, filters, row) {
  const run = rows.field(row, "run"), wantedRun = filters.chosen("run"), live = filters.chosen("live");
  if (isHidden(page, run) || (wantedRun && run !== Number(wantedRun))) return false;
  if (live && rows.field(row, "live") !== (live === "yes")) return false;
  if (filters.group && rows.group(row) !== filters.group) return false;
  for (const [name, test] of Object.entries(filters.tests)) if (test && !test(rows.field(row, name))) return false;
  return !filters.query || rows.contains(row, filters.query);
}
