// The filters above the table of completions.
// Defines: createFilters.

// The test that a filter such as 3, >0.5, <=2 or 1..4 describes; null for an empty one, undefined for an invalid one.
function parseFilter(text) {
  const clean = text.replaceAll("−", "-").replaceAll(" ", "");
  if (!clean) return null;
  const range = clean.match(/^(-?[\d.]+?)\.\.(-?[\d.]+)$/);
  if (range) return (x) => x !== null && x >= Number(range[1]) && x <= Number(range[2]);
  const single = clean.match(/^(>=|<=|>|<|=)?(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)$/i);
  if (!single) return undefined;
  const bound = Number(single[2]);
  switch (single[1]) {
    case ">": return (x) => x !== null && x > bound;
    case ">=": return (x) => x !== null && x >= bound;
    case "<": return (x) => x !== null && x < bound;
    case "<=": return (x) => x !== null && x <= bound;
    default: return (x) => x === bound;
  }
}

// numeric: [{name, example}] of the columns with a numeric filter; selects: [{name, label, options}].
// Returns {query (lower case), group, tests (by column), chosen (value of a select), showGroup, node}.
// Every change is remembered in the address and calls onChange.
function createFilters({ numeric, selects, onChange }) {
  const filters = { query: (saved.get("q") || "").toLowerCase(), group: saved.get("group"), tests: {} };
  let timer = 0;
  const onType = () => { clearTimeout(timer); timer = setTimeout(onChange, 120); };
  const search = el("input", {
    class: "search", id: "search", type: "search", value: saved.get("q") || "",
    placeholder: "in prompts and completions",
    oninput: () => { filters.query = search.value.toLowerCase(); remember("q", search.value); onType(); },
  });
  const inputs = numeric.map((column) => numericFilter(filters, column, onType));
  const lists = selects.map((select) => selectFilter(select, onChange));
  filters.chosen = (name) => document.getElementById(`filter-${name}`)?.value || "";
  filters.showGroup = (group) => {
    filters.group = group;
    remember("group", group);
    groupButton.hidden = !group;
    onChange();
  };
  const groupButton = el("button", {
    class: "pill on", hidden: !filters.group, title: "Show all again", onclick: () => filters.showGroup(null),
  }, "one group ×");
  const clear = el("button", { class: "pill", id: "clear", onclick: () => {
    search.value = filters.query = "";
    remember("q", "");
    filters.tests = {};
    for (const { lastChild: input } of [...inputs, ...lists]) {
      input.value = "";
      input.classList.remove("bad");
      input.title = "";
      remember(input.id.replace("filter-", "f."), "");
    }
    filters.showGroup(null);
  } }, "clear");
  const first = lists.length > 1 ? [lists[0]] : []; // the choice of a run precedes the numbers
  const label = el("label", { class: "wide" }, "search", search);
  filters.node = el("div", { class: "toolbar" }, label, first, inputs, lists.at(-1), groupButton, clear);
  return filters;
}

function numericFilter(filters, { name, example }, onChange) {
  const read = () => {
    const test = parseFilter(input.value);
    input.classList.toggle("bad", test === undefined);
    input.title = test === undefined ? "A number, or >0.5, <=2, 1..4" : "";
    filters.tests[name] = test || null;
  };
  const input = el("input", {
    class: "short", id: `filter-${name}`, placeholder: example || "any", value: saved.get(`f.${name}`) || "",
    oninput: () => { read(); remember(`f.${name}`, input.value); onChange(); },
  });
  read();
  return el("label", {}, name, input);
}

function selectFilter({ name, label, options }, onChange) {
  const choices = options.map(([value, text]) => el("option", { value }, text));
  const list = el("select", {
    id: `filter-${name}`, onchange: () => { remember(`f.${name}`, list.value); onChange(); },
  }, choices);
  list.value = saved.get(`f.${name}`) || "";
  if (list.selectedIndex < 0) list.value = "";
  return el("label", {}, label, list);
}
