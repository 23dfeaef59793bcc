// The table of syncs. To add a column, add it to syncColumns; page_data.py sends every number of syncs.jsonl.
// Defines: showSyncs.

function showSyncs(page) {
  const rows = page.runs.flatMap((run, i) => run.syncs.version.map((_, k) => ({ run: i, k })));
  if (!rows.length) return;
  const note = "Policy → engine. The checksum is computed from the engine's weights after the sync.";
  const value = (row, name) => page.runs[rows[row].run].syncs[name]?.[rows[row].k];
  const since = (row) => (rows[row].k ? value(row, "step") - value(row - 1, "step") : null);
  const order = (key) => (row) => (key === "run" ? rows[row].run : key === "since" ? since(row) : value(row, key));
  const columns = syncColumns(value, since);
  if (page.several) {
    const cell = (row) => [dot(colourOf(page, rows[row].run)), page.runs[rows[row].run].name];
    columns.unshift({ title: "run", key: "run", cell });
  }
  const table = createTable({ id: "syncs", columns, count: rows.length, size: 12, order });
  table.node.style.marginTop = "14px";
  addSection("Syncs", note).append(table.node);
  table.update();
}

const syncColumns = (value, since) => [
  { title: "version", key: "version", numeric: true, cell: (row) => number(value(row, "version")) },
  { title: "rollout", key: "rollout", numeric: true, cell: (row) => number(value(row, "rollout")) },
  { title: "step", key: "step", numeric: true, cell: (row) => number(value(row, "step")) },
  { title: "steps since", key: "since", numeric: true, cell: (row) => number(since(row)) },
  { title: "checksum", kind: "mono", cell: (row) => escaped(value(row, "checksum")) },
  { title: "size", key: "num_bytes", numeric: true, cell: (row) => bytes(value(row, "num_bytes")) },
  { title: "took", key: "seconds", numeric: true, cell: (row) => duration(value(row, "seconds")) },
];
