// The settings of the runs; settings that differ come first.
// Defines: showSettings.

const NOT_COMPARED = ["run", "trainer.default_root_dir"]; // differ between any two runs

function showSettings({ data: { settings }, runs, several }) {
  if (!settings.length) return;
  const legend = "Settings that differ between the runs come first; × marks a setting that a run does not have.";
  const section = addSection("Settings", several ? legend : "Settings of the last attempt.");
  const differs = settings.map(({ key, values }) => new Set(values).size > 1 && !NOT_COMPARED.includes(key));
  const order = settings.map((_, i) => i).sort((a, b) => differs[b] - differs[a] || a - b);
  const body = el("tbody");
  const fill = () => {
    const wanted = find.value.toLowerCase();
    const contains = (text) => text !== null && text.toLowerCase().includes(wanted);
    const isMatch = ({ key, values }) => [key, ...values].some(contains);
    const shown = order.filter((i) => (!only.checked || differs[i]) && isMatch(settings[i]));
    body.replaceChildren(...shown.map((i) => settingRow(settings[i], several && differs[i])));
    const empty = only.checked && !wanted ? "The runs have the same settings." : "No settings match.";
    if (!shown.length) body.append(el("tr", {}, el("td", { class: "none", colSpan: runs.length + 1 }, empty)));
  };
  const find = el("input", {
    class: "search", id: "find-setting", type: "search", placeholder: "name or value", oninput: fill,
  });
  const only = el("input", {
    type: "checkbox", id: "only-differences", checked: several && differs.some(Boolean), onchange: fill,
  });
  const style = "display:flex;gap:6px;align-items:center;height:34px;font-size:14px";
  const onlyLabel = several ? el("label", { style }, only, "only differences") : null;
  const titles = runs.map((run, i) => el("th", {}, several ? [dot(i), run.name] : "value"));
  const head = el("thead", {}, el("tr", {}, el("th", {}, "setting"), titles));
  section.append(
    el("div", { class: "toolbar" }, el("label", { class: "wide" }, "find", find), onlyLabel),
    el("div", { class: "scroller tall" }, el("table", { id: "settings" }, head, body)),
  );
  fill();
}

function settingRow({ key, values, before }, isDifferent) {
  const cells = values.map((value, i) => {
    if (value === null) return el("td", { class: "none" }, "×");
    const earlier = before[i] === null ? "" : el("span", { class: "quiet" }, escaped(before[i]), " → ");
    return el("td", { class: "mono" }, earlier, escaped(value));
  });
  return el("tr", { class: isDifferent ? "differs" : "" }, el("td", { class: "mono" }, escaped(key)), cells);
}
