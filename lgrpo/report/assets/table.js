// A table of any length: sortable, one page of rows in the document at a time, optionally a detail below a row.
// Defines: createTable.

// columns: {title, key (sortable if given), numeric, kind (class of the cells), cell (row index -> nodes)}
// order: (key) -> (row index -> value to sort by); detail: row index -> nodes shown below a row that was clicked.
// Returns {node, keep, update}: set keep to filter rows; update() draws, update(true) returns to the first page.
function createTable({ id, columns, count, size, detail, order }) {
  const body = el("tbody"), counter = el("span"), pager = el("span");
  const table = {
    node: null,
    keep: () => true,
    update: (isNew) => {
      rows = sorted(Array.from({ length: count }, (_, i) => i).filter((i) => table.keep(i)));
      if (isNew) goTo(0); else draw();
    },
  };
  let rows = [], page = Number(saved.get(`${id}.page`)) || 0, opened = null;
  let [sortKey, direction] = (saved.get(`${id}.sort`) || "").split(":");

  const sortBy = (key) => {
    const next = { "": "up", up: "down", down: "" };
    direction = next[sortKey === key ? direction : ""];
    sortKey = direction ? key : "";
    remember(`${id}.sort`, sortKey ? `${sortKey}:${direction}` : "");
    table.update();
  };
  const sorted = (indices) => {
    if (sortKey) indices.sort(comparison(order(sortKey), direction === "up" ? 1 : -1));
    return indices;
  };
  const goTo = (target) => { page = target; remember(`${id}.page`, page || ""); opened = null; draw(); };
  const toggle = (row) => {
    if (!getSelection().isCollapsed) return; // the reader selects text of the row
    opened = opened === row ? null : row;
    draw();
  };
  const draw = () => {
    const numPages = Math.max(1, Math.ceil(rows.length / size));
    page = Math.min(page, numPages - 1);
    const arrow = direction === "up" ? " ↑" : " ↓";
    for (const [key, mark] of arrows) mark.textContent = key === sortKey ? arrow : "";
    const shown = rows.slice(page * size, (page + 1) * size);
    body.replaceChildren(...shown.flatMap((row) => tableRow(row, columns, detail, opened === row, toggle)));
    if (!rows.length) body.append(el("tr", {}, el("td", { class: "none", colSpan: columns.length }, "No rows match.")));
    counter.textContent = (rows.length === count ? "" : `${whole(rows.length)} of `) + plural(count, "row");
    pager.replaceChildren(...(numPages > 1 ? pageButtons(page, numPages, goTo) : []));
  };
  const arrows = new Map(columns.filter((column) => column.key).map((column) => [column.key, el("span")]));
  const titles = columns.map(({ key, title, numeric }) => el("th", { class: numeric ? "num" : "" },
    key ? el("button", { onclick: () => sortBy(key) }, title, arrows.get(key)) : title));
  const grid = el("table", { id, class: "cards" }, el("thead", {}, el("tr", {}, titles)), body);
  table.node = el("div", {}, el("div", { class: "scroller" }, grid), el("div", { class: "pager" }, counter, pager));
  return table;
}

// Missing values come last in either direction; equal values keep their order.
const comparison = (value, sign) => (a, b) => {
  const x = value(a), y = value(b);
  if (x === y) return a - b;
  if (isMissing(x)) return 1;
  if (isMissing(y)) return -1;
  return (x < y ? -1 : 1) * sign;
};

function tableRow(row, columns, detail, isOpen, toggle) {
  const cells = columns.map(({ title, kind, numeric, cell }) => {
    const content = [cell(row)].flat();
    const inner = kind === "text" ? [el("div", {}, content)] : content;
    return el("td", { class: kind || (numeric ? "num" : ""), data: { label: title } }, inner);
  });
  if (!detail) return [el("tr", { class: "row", style: "cursor:default" }, cells)];
  const line = el("tr", {
    class: isOpen ? "row open" : "row",
    tabIndex: 0,
    "aria-expanded": isOpen,
    onclick: () => toggle(row),
    onkeydown: (event) => { if (event.key === "Enter") toggle(row); },
  }, cells);
  return isOpen ? [line, el("tr", { class: "detail" }, el("td", { colSpan: columns.length }, detail(row)))] : [line];
}

const pageButtons = (page, numPages, goTo) => [
  el("button", { class: "pill", disabled: page === 0, onclick: () => goTo(page - 1) }, "previous"),
  el("span", { class: "small", style: "align-self:center" }, `${whole(page + 1)} of ${whole(numPages)}`),
  el("button", { class: "pill", disabled: page >= numPages - 1, onclick: () => goTo(page + 1) }, "next"),
];
