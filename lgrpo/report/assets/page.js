(() => {
"use strict";

// Nothing of a run is ever markup here: every piece of it is put in as the text of a node.
const el = (tag, properties = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const palette = (i) => colour(`--c${i % 8}`);
const dot = (i) => {
  const node = el("i", { class: "dot" });
  node.style.background = `var(--c${i % 8})`;
  return node;
};
const whole = (value) => value.toLocaleString("en-GB");
const number = (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return whole(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("-", "−");
  return value.toLocaleString("en-GB", { maximumFractionDigits: size >= 100 ? 1 : size >= 10 ? 2 : 4 }).replace("-", "−");
};
const fixed = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(0)}%`);
const duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${number(Number((1000 * seconds).toPrecision(3)))} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
};
const bytes = (count) => (count >= 1e9 ? `${(count / 1e9).toFixed(2)} GB` : count >= 1e6 ? `${(count / 1e6).toFixed(1)} MB` : `${(count / 1e3).toFixed(0)} kB`);
const plural = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;

// What is shown survives a reload in the address: filters, zoom, axis, theme.
const state = new URLSearchParams(location.hash.slice(1));
const remember = (name, value) => {
  if (value === null || value === undefined || value === "") state.delete(name);
  else state.set(name, value);
  try { history.replaceState(null, "", `#${state}`); } catch { location.hash = state.toString(); }
};

async function unpack() {
  const packed = atob(document.getElementById("data").textContent);
  const raw = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Theme

const dark = matchMedia("(prefers-color-scheme: dark)");
const applyTheme = () => {
  const chosen = state.get("theme");
  const isDark = chosen ? chosen === "dark" : dark.matches;
  document.documentElement.classList.toggle("dark", isDark);
  document.documentElement.style.colorScheme = isDark ? "dark" : "light";
};
applyTheme();

function show(data) {
  const { runs } = data;
  const several = runs.length > 1;
  const hidden = new Set((state.get("hide") || "").split(",").filter(Boolean).map(Number));
  const visible = () => runs.map((_, i) => i).filter((i) => !hidden.has(i));
  document.title = `${runs.map((run) => run.name).join(", ")} · lgrpo`;

  // The head of the page

  const place = (run) => {
    const { v, i, P, G } = run.place;
    const cycle = v ?? (run.sync && run.sync !== "WeightSync" ? run.sync : "∞");
    return i === null || i === undefined ? "" : `(v, i) = (${cycle}, ${i}), ${P} × ${G} completions`;
  };
  const progress = (run) => {
    const planned = run.planned_steps;
    const done = planned !== null && run.num_steps >= planned;
    const ago = data.made - run.written;
    const when = ago < 90 ? "just now" : `${duration(ago)} before this page`;
    return { value: whole(run.num_steps), more: done ? `of ${whole(planned)}: complete` : `${planned ? `of ${whole(planned)}; ` : ""}last written ${when}` };
  };
  const gain = (h) => (h.pass_last === null ? "–" : `${fixed(h.pass_first, 2)} → ${fixed(h.pass_last, 2)}`);
  const tile = (label, value, more) => el("div", { class: "tile" }, el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "more" }, more || "\u00a0"));

  const head = document.getElementById("head");
  const themeName = () => `${state.get("theme") || "auto"} theme`;
  const theme = el("button", { class: "pill", id: "theme", onclick: () => {
    const order = { auto: "light", light: "dark", dark: "" };
    remember("theme", order[state.get("theme") || "auto"]);
    theme.textContent = themeName();
    applyTheme();
    redraw();
  } }, themeName());
  dark.addEventListener("change", () => { applyTheme(); redraw(); });
  const hasClock = runs.every((run) => run.clock[0].length > 1);
  const axis = () => (hasClock && state.get("x") === "time" ? "time" : "step");
  const axisName = () => (axis() === "time" ? "by training time" : "by step");
  const axisButton = el("button", { class: "pill", id: "axis", title: "What the curves are drawn against", onclick: () => {
    remember("x", axis() === "time" ? "" : "time");
    remember("zoom", "");
    axisButton.textContent = axisName();
    redraw();
  } }, axisName());
  const live = el("button", { class: "pill live", onclick: () => { remember("still", state.get("still") ? "" : "1"); showLive(); } });
  const showLive = () => {
    live.classList.toggle("off", Boolean(state.get("still")));
    live.textContent = state.get("still") ? "paused" : `live, every ${data.refresh} s`;
  };
  showLive();
  head.append(
    el("div", { class: "brand" }, el("span", {}, el("b", {}, "lgrpo"), several ? ` · ${runs.length} runs side by side` : " · a run"),
      el("span", { class: "tools" }, data.refresh ? live : null, hasClock ? axisButton : null, theme)),
    el("h1", {}, several ? runs.map((run) => run.name).join(", ") : runs[0].name),
  );
  const tasks = [...new Set(runs.map((run) => run.task))];
  const models = [...new Set(runs.map((run) => run.model))];
  const sub = [tasks.length === 1 ? tasks[0] : null, models.length === 1 ? models[0] : null, several ? null : place(runs[0])].filter(Boolean);
  head.append(el("p", { class: "sub" }, sub.join(" · ")));
  if (several) {
    head.append(el("div", { class: "chips" }, runs.map((run, i) => {
      const chip = el("button", { class: "pill chip on", title: "Show or hide this run", onclick: () => {
        if (hidden.has(i)) hidden.delete(i); else hidden.add(i);
        remember("hide", [...hidden].join(","));
        chip.classList.toggle("off", hidden.has(i));
        redraw();
        completions.refresh();
      } }, dot(i), run.name);
      chip.classList.toggle("off", hidden.has(i));
      return chip;
    })));
    const rows = runs.map((run, i) => {
      const h = run.headline;
      const { v, i: reuse } = run.place;
      const cells = [gain(h), h.pass_error === null ? "–" : `± ${fixed(1.96 * h.pass_error, 3)}`, fixed(h.pass_best, 2), fixed(h.reward, 3), v ?? run.sync ?? "–", reuse ?? "–", whole(run.syncs.version.length), number(h.lag_max), whole(run.num_steps) + (run.planned_steps && run.num_steps < run.planned_steps ? ` of ${whole(run.planned_steps)}` : ""), percent(h.trainer_idle), duration(h.seconds)];
      return el("tr", {}, el("td", {}, dot(i), run.name, tasks.length > 1 ? el("div", { class: "small" }, run.task || "task not known") : null), cells.map((cell) => el("td", { class: "num" }, String(cell))));
    });
    const titles = ["run", "pass@1", "95%", "best", "reward", "v", "i", "syncs", "largest lag", "steps", "trainer idle", "training time"];
    head.append(el("div", { class: "scroller", style: "margin-top:18px" }, el("table", { id: "summary" }, el("thead", {}, el("tr", {}, titles.map((t, k) => el("th", { class: k ? "num" : "" }, t)))), el("tbody", {}, rows))));
  } else {
    const run = runs[0], h = run.headline, steps = progress(run);
    head.append(el("div", { class: "tiles", id: "tiles" },
      tile("pass@1, held out", gain(h), h.pass_error === null ? "" : `± ${fixed(1.96 * h.pass_error, 3)}, best ${fixed(h.pass_best, 2)}`),
      tile("reward", fixed(h.reward, 3), `mean of the last ${plural(h.reward_over, "rollout")}`),
      tile("optimizer steps", steps.value, steps.more),
      tile("syncs", whole(run.syncs.version.length), `largest lag ${number(h.lag_max)}`),
      tile("trainer idle", percent(h.trainer_idle), `engine ${percent(h.engine_idle)}`),
      tile("training time", duration(h.seconds), "waiting and updating"),
    ));
  }
  const notes = [...data.notes, ...runs.flatMap((run) => run.notes.map((note) => (several ? `${run.name}: ${note}` : note)))];
  if (notes.length) head.append(el("ul", { class: "notes", id: "notes" }, notes.map((note) => el("li", {}, escaped(note)))));

  // Curves

  const main = document.getElementById("page");
  main.replaceChildren();
  const cards = [];
  const plots = (window.pageCharts = new Map());
  let zoom = (state.get("zoom") || "").split("..").map(Number);
  if (zoom.length !== 2 || zoom.some(Number.isNaN) || !state.get("zoom")) zoom = null;

  const at = (run, step) => {
    // seconds of training before a step, between the points of its clock
    if (axis() === "step") return step;
    const [steps, seconds] = run.clock;
    let low = 0, high = steps.length - 1;
    if (step <= steps[0]) return seconds[0];
    if (step >= steps[high]) return seconds[high];
    while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
    return seconds[low] + ((step - steps[low]) / (steps[high] - steps[low])) * (seconds[high] - seconds[low]);
  };
  const onAxis = (run, [steps, values]) => {
    const xs = [], ys = [];
    steps.forEach((step, i) => {
      const x = at(run, step);
      if (xs.length && x <= xs[xs.length - 1]) return; // beyond the clock
      xs.push(x); ys.push(values[i]);
    });
    return [xs, ys];
  };

  const linesOf = (chart, chosen) => {
    const lines = [];
    const metrics = Object.entries(chart.lines);
    for (const i of visible()) {
      const run = runs[i];
      metrics.forEach(([metric, label], k) => {
        if (!run.series[metric]) return;
        const isSmooth = metric.endsWith(" (smoothed)");
        const base = metrics.some(([other]) => other === `${metric} (smoothed)`);
        if (several && !isSmooth && !base && metrics.length > 1 && metric !== chosen) return;
        const paint = several ? i : isSmooth || base ? 0 : k;
        lines.push({ run, metric, label: several ? run.name : label, paint, faint: base && run.series[`${metric} (smoothed)`], strong: isSmooth, points: onAxis(run, run.series[metric]), steps: run.series[metric][0].length });
        const error = run.series[`${metric}_stderr`];
        const width = new Map(error ? error[0].map((step, j) => [step, error[1][j]]) : []);
        if (error && !(several && base)) {
          const [steps, values] = run.series[metric];
          const shift = (sign) => onAxis(run, [steps, steps.map((s, j) => (values[j] === null || width.get(s) === undefined || width.get(s) === null ? null : values[j] + sign * 1.96 * width.get(s)))]);
          lines[lines.length - 1].band = [shift(1), shift(-1)];
        }
      });
    }
    return lines;
  };

  const syncMarks = (u, chart) => {
    if (!chart.marks) return;
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio || 1;
    const { min, max } = u.scales.x;
    ctx.save();
    ctx.lineWidth = ratio;
    visible().forEach((i) => {
      const moments = runs[i].syncs.step.filter((step) => step !== null).map((step) => at(runs[i], step)).filter((x) => x >= min && x <= max);
      const dense = moments.length > bbox.width / ratio / 7;
      ctx.strokeStyle = several ? palette(i) : colour("--sync");
      ctx.globalAlpha = several ? 0.55 : 1;
      ctx.setLineDash(dense ? [] : several ? [] : [2 * ratio, 3 * ratio]);
      ctx.beginPath();
      for (const x of moments) {
        const px = Math.round(u.valToPos(x, "x", true)) + 0.5;
        // many, or of several runs: short strokes at the foot, else a line through the chart
        const top = dense || several ? bbox.top + bbox.height - (several ? 5 + 5 * visible().indexOf(i) : 6) * ratio : bbox.top;
        ctx.moveTo(px, top);
        ctx.lineTo(px, several ? top + 4 * ratio : bbox.top + bbox.height);
      }
      ctx.stroke();
    });
    ctx.restore();
  };

  const build = (card) => {
    const { chart, box, legend } = card;
    card.plot?.destroy();
    box.replaceChildren();
    const lines = linesOf(chart, card.chosen);
    legend.replaceChildren();
    if (!lines.length) { box.append(el("p", { class: "small" }, "Nothing of the runs shown.")); card.plot = null; return; }
    const windows = [...new Set(lines.filter((line) => line.strong).map((line) => line.run.smoothing_window))];
    card.note.textContent = [chart.note, lines.some((line) => line.band) ? "The band is the 95% interval." : "", windows.length ? `Smoothed: the mean over ${windows.join(" or ")} rollouts up to each.` : ""].filter(Boolean).join(" ");
    const tables = [], series = [{}], bands = [];
    for (const line of [...lines].reverse()) { // the first is drawn last, on top
      const paint = palette(line.paint);
      const few = line.points[0].length <= 60;
      tables.push(line.points);
      line.at = series.length;
      series.push({ label: line.label, stroke: paint, width: line.strong ? 2.2 : line.faint ? 1 : 1.6, alpha: line.faint ? 0.38 : 1, spanGaps: true, points: { show: few && !line.strong && !line.faint, size: 5, fill: colour("--card"), width: 1.4 } });
      if (line.band) {
        tables.push(line.band[0], line.band[1]);
        series.push(...[1, 2].map(() => ({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } })));
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${paint}${line.faint ? "1c" : "26"}` });
      }
    }
    const joined = tables.length === 1 ? tables[0] : uPlot.join(tables);
    const axisStyle = { stroke: colour("--faint"), font: `11px ${getComputedStyle(document.body).fontFamily}`, grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
    const range = (u, low, high) => {
      if (chart.least !== null) low = Math.min(chart.least, low ?? 0);
      if (chart.most !== null) high = Math.max(chart.most, high ?? 1);
      if (low === null || high === null) return [0, 1];
      if (low === high) { const pad = Math.abs(low) * 0.1 || (chart.least === 0 ? 1 : 0.1); return [chart.least === 0 && low === 0 ? 0 : low - pad, high + pad]; }
      const pad = (high - low) * 0.06;
      return [chart.least !== null && low === chart.least ? low : low - pad, chart.most !== null && high === chart.most ? high : high + pad];
    };
    const nearest = (u, s, index) => {
      // of a curve that has no value just here, the value nearest to it
      const ys = u.data[s];
      if (ys[index] !== null && ys[index] !== undefined) return index;
      for (let d = 1; d < ys.length; d++) {
        if (index - d >= 0 && ys[index - d] !== null && ys[index - d] !== undefined) return index - d;
        if (index + d < ys.length && ys[index + d] !== null && ys[index + d] !== undefined) return index + d;
      }
      return index;
    };
    const where = el("span");
    const values = lines.map((line) => {
      const value = el("b");
      const mark = dot(line.paint);
      if (line.faint) mark.style.opacity = 0.4;
      if (!line.faint || !several) legend.append(el("span", {}, mark, `${line.label} `, value));
      return value;
    });
    legend.append(where);
    const tell = (u) => {
      const hovered = u.cursor.idx !== null && u.cursor.idx !== undefined && u.cursor.left >= 0;
      lines.forEach((line, k) => {
        const ys = u.data[line.at];
        let index = hovered ? nearest(u, line.at, u.cursor.idx) : ys.length - 1;
        if (!hovered) while (index > 0 && (ys[index] === null || ys[index] === undefined)) index--;
        const band = line.band ? u.data[line.at + 1][index] : null;
        values[k].textContent = number(ys[index]) + (band !== null && band !== undefined && !line.faint ? ` ± ${number(Number((band - ys[index]).toPrecision(2)))}` : "");
      });
      const x = hovered ? u.data[0][u.cursor.idx] : null;
      where.textContent = x === null ? "" : axis() === "time" ? `at ${duration(x)}` : `at step ${whole(x)}`;
    };
    card.plot = new uPlot({
      width: Math.max(120, box.clientWidth), height: card.height, legend: { show: false }, series, bands, padding: [8, 16, 0, 0],
      scales: { x: { time: false, range: (u, low, high) => (zoom ? zoom : low === high ? [low - 1, high + 1] : [low, high]) }, y: { range } },
      axes: [
        { ...axisStyle, grid: { show: false }, size: 26, space: 70, values: (u, ticks) => ticks.map((t) => (axis() === "time" ? (t === 0 ? "0" : duration(t)) : Number.isInteger(t) ? whole(t) : "")) },
        { ...axisStyle, size: 52, space: 34, values: (u, ticks) => ticks.map(number) },
      ],
      cursor: { sync: { key: "page", setSeries: false, scales: ["x", null] }, dataIdx: nearest, points: { size: 7, width: 0, fill: (u, s) => u.series[s].stroke(u, s), stroke: "transparent" }, drag: { x: true, y: false, setScale: true }, bind: { dblclick: () => () => { setZoom(null); return null; } } },
      hooks: {
        drawClear: [(u) => syncMarks(u, chart)],
        setCursor: [tell],
        setSelect: [(u) => { if (u.select.width > 4) setZoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]); }],
      },
    }, joined, box);
    tell(card.plot);
    card.built = true;
    plots.set(`${card.section} / ${chart.title}`, { plot: card.plot, lines });
  };
  const setZoom = (range) => {
    zoom = range;
    remember("zoom", range ? range.map((x) => Number(x.toPrecision(6))).join("..") : "");
    unzoom.hidden = !range;
    for (const card of cards) card.plot?.setData(card.plot.data);
  };
  const unzoom = el("button", { class: "pill", id: "unzoom", hidden: !zoom, onclick: () => setZoom(null) }, "whole run");
  const redraw = () => cards.filter((card) => card.built).forEach(build);
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && !entry.target.card.built) build(entry.target.card);
  }, { rootMargin: "400px" });
  const sizes = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) if (target.card.plot && Math.abs(target.card.plot.width - contentRect.width) > 1) target.card.plot.setSize({ width: contentRect.width, height: target.card.height });
  });
  addEventListener("beforeprint", () => cards.filter((card) => !card.built).forEach(build));

  const sectionOf = (title, note) => {
    const section = el("section", { data: { title } }, el("h2", {}, title), note ? el("p", { class: "note" }, note) : null);
    main.append(section);
    return section;
  };
  // A curve that stays where it is for the whole run is told in words.
  const isStill = (chart) => Object.keys(chart.lines).every((name) => {
    const values = runs.flatMap((run) => run.series[name]?.[1] || []);
    return values.length > 2 * runs.length && values.every((value) => value !== null && value === values[0]);
  });
  const stillAt = (name) => number(runs.find((run) => run.series[name]).series[name][1][0]);
  for (const [number_, { title, note, charts }] of data.sections.entries()) {
    const section = sectionOf(title, title === "Learning" ? "Drag over a chart to zoom all of them, double-click to zoom out." : title === "Off-policy" && runs.some((run) => run.syncs.step.length) ? "Strokes mark the moments of syncs: dashed lines where there is room, ticks at the foot of a chart where there are many." : note);
    if (title === "Time") section.append(stageBars());
    const still = title === "Learning" ? [] : charts.filter(isStill);
    const grid = el("div", { class: title === "Learning" ? "charts large" : "charts" });
    section.append(grid);
    if (still.length) section.append(el("p", { class: "small still" }, `Never changed: ${still.flatMap((chart) => Object.keys(chart.lines).map((name) => `${name} ${stillAt(name)}`)).join(", ")}.`));
    charts.forEach((chart, place_) => {
      if (still.includes(chart)) return;
      const key = `${number_}.${place_}`;
      const metrics = Object.keys(chart.lines);
      const card = { chart, section: title, chosen: state.get(`m${key}`) || metrics[0], height: title === "Learning" ? 250 : 196, box: el("div", { class: "plot" }), note: el("p", { class: "note" }, chart.note), legend: el("div", { class: "legend" }) };
      const selectable = several && metrics.length > 1 && !metrics.some((name) => name.endsWith(" (smoothed)"));
      const choose = selectable ? el("div", { class: "choose" }, metrics.map((metric) => {
        const button = el("button", { onclick: () => {
          card.chosen = metric;
          remember(`m${key}`, metric === metrics[0] ? "" : metric);
          for (const other of choose.children) other.classList.toggle("on", other === button);
          build(card);
        } }, chart.lines[metric]);
        button.classList.toggle("on", metric === card.chosen);
        return button;
      })) : null;
      card.box.card = card;
      card.box.style.height = `${card.height}px`;
      grid.append(el("div", { class: "chart" }, el("div", { class: "top" }, el("h3", {}, chart.title), choose), card.legend, card.box, card.note));
      cards.push(card);
      watch.observe(card.box);
      sizes.observe(card.box);
    });
  }

  function stageBars() {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.stages)))];
    const longest = Math.max(...runs.map((run) => Object.values(run.stages).reduce((a, b) => a + b, 0)));
    const box = el("div", { class: "bars", id: "stages" }, el("div", { class: "legend" }, names.map((name, k) => el("span", {}, dot(k), name)), el("span", { class: "quiet" }, "mean seconds of a rollout in each stage")));
    runs.forEach((run, i) => {
      const total = Object.values(run.stages).reduce((a, b) => a + b, 0);
      const track = el("div", { class: "track" }, names.map((name, k) => {
        const part = el("i", { title: `${name} ${duration(run.stages[name])}` });
        part.style.background = `var(--c${k % 8})`;
        part.style.width = `${(100 * (run.stages[name] || 0)) / (longest || 1)}%`;
        return part;
      }));
      const figures = names.map((name) => `${name} ${duration(run.stages[name])}`).join(" · ");
      box.append(el("div", { class: "bar" }, el("span", {}, several ? dot(i) : null, several ? run.name : "each rollout", el("span", { class: "small" }, `  trainer idle ${percent(run.headline.trainer_idle)}, engine idle ${percent(run.headline.engine_idle)}`)), el("span", { class: "figures" }, duration(total)), track, el("span", { class: "small" }, figures)));
    });
    if (runs.some((run) => run.overlaps)) box.append(el("p", { class: "small", style: "margin-top:8px" }, "With data.lead, generation goes on during updates: the parts overlap, and a rollout takes less than their sum."));
    return box;
  }

  // Tables

  // Characters that show nothing, or turn what follows them around, are spelled out.
  function escaped(text, query) {
    const nodes = [];
    const odd = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
    const plain = (piece) => {
      if (!query) { nodes.push(piece); return; }
      const lower = piece.toLowerCase();
      let from = 0;
      for (let found = lower.indexOf(query); found >= 0; found = lower.indexOf(query, from)) {
        nodes.push(piece.slice(from, found), el("mark", {}, piece.slice(found, found + query.length)));
        from = found + query.length;
      }
      nodes.push(piece.slice(from));
    };
    let end = 0;
    for (const match of text.matchAll(odd)) {
      plain(text.slice(end, match.index));
      nodes.push(el("span", { class: "esc" }, `\\u${match[0].charCodeAt(0).toString(16).padStart(4, "0")}`));
      end = match.index + match[0].length;
    }
    plain(text.slice(end));
    return nodes;
  }
  const excerpt = (text, query) => {
    const most = 320;
    if (text.length <= most) return text;
    const found = query ? text.toLowerCase().indexOf(query) : -1;
    const start = found > 90 ? found - 40 : 0; // a match is among the three lines that show
    return (start ? "…" : "") + text.slice(start, start + most) + (start + most < text.length ? "…" : "");
  };

  // A table of any length: the rows of one page are in the document, no more.
  function table({ id, columns, count, size, detail, order, cards: asCards }) {
    const body = el("tbody"), counted = el("span"), turn = el("span");
    const headCells = columns.map((column) => el("th", { class: column.numeric ? "num" : "" }, column.key ? el("button", { onclick: () => sortBy(column.key) }, column.title, el("span")) : column.title));
    const node = el("div", {}, el("div", { class: "scroller" }, el("table", { id, class: asCards ? "cards" : "" }, el("thead", {}, el("tr", {}, headCells)), body)), el("div", { class: "pager" }, counted, turn));
    let rows = Array.from({ length: count }, (_, i) => i), page = Number(state.get(`${id}.page`)) || 0, opened = null;
    let [sort, direction] = (state.get(`${id}.sort`) || "").split(":");
    const sortBy = (key) => {
      direction = sort === key && direction === "up" ? "down" : sort === key && direction === "down" ? "" : "up";
      sort = direction ? key : "";
      remember(`${id}.sort`, sort ? `${sort}:${direction}` : "");
      api.update();
    };
    const go = (to) => { page = to; remember(`${id}.page`, page || ""); opened = null; draw(); };
    const draw = () => {
      const pages = Math.max(1, Math.ceil(rows.length / size));
      page = Math.min(page, pages - 1);
      headCells.forEach((cell, k) => { const mark = cell.querySelector("span"); if (mark) mark.textContent = columns[k].key === sort ? (direction === "up" ? " ↑" : " ↓") : ""; });
      body.replaceChildren(...rows.slice(page * size, (page + 1) * size).flatMap((row) => {
        const line = el("tr", { class: detail ? `row${opened === row ? " open" : ""}` : "row", style: detail ? "" : "cursor:default" }, columns.map((column) => {
          const cell = el("td", { class: column.kind || (column.numeric ? "num" : ""), data: { label: column.title } });
          const content = column.cell(row);
          if (column.kind === "text") cell.append(el("div", {}, content)); else cell.append(...[content].flat());
          return cell;
        }));
        if (!detail) return [line];
        line.tabIndex = 0;
        line.setAttribute("aria-expanded", opened === row);
        const toggle = () => { if (getSelection().isCollapsed) { opened = opened === row ? null : row; draw(); } };
        line.addEventListener("click", toggle);
        line.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
        return opened === row ? [line, el("tr", { class: "detail" }, el("td", { colSpan: columns.length }, detail(row)))] : [line];
      }));
      if (!rows.length) body.append(el("tr", {}, el("td", { class: "none", colSpan: columns.length }, "Nothing fits.")));
      counted.textContent = rows.length === count ? plural(count, "row") : `${whole(rows.length)} of ${plural(count, "row")}`;
      turn.replaceChildren(...(pages > 1 ? [el("button", { class: "pill", disabled: page === 0, onclick: () => go(page - 1) }, "before"), el("span", { class: "small", style: "align-self:center" }, `${whole(page + 1)} of ${whole(pages)}`), el("button", { class: "pill", disabled: page >= pages - 1, onclick: () => go(page + 1) }, "next")] : []));
    };
    const api = {
      node,
      keep: () => true,
      update: (first) => {
        rows = [];
        for (let i = 0; i < count; i++) if (api.keep(i)) rows.push(i);
        if (sort) {
          const value = order(sort), sign = direction === "up" ? 1 : -1;
          rows.sort((a, b) => {
            const x = value(a), y = value(b);
            if (x === y) return a - b;
            if (x === null || x === undefined) return 1;
            if (y === null || y === undefined) return -1;
            return (x < y ? -1 : 1) * sign;
          });
        }
        if (first) { page = 0; remember(`${id}.page`, ""); opened = null; }
        draw();
      },
    };
    return api;
  }

  // Syncs

  const ledger = runs.flatMap((run, i) => run.syncs.version.map((_, k) => ({ run: i, k })));
  if (ledger.length) {
    const section = sectionOf("Syncs", "Policy → engine, as verified: the checksum is of the engine's own weights after each sync.");
    const of = (row, name) => runs[ledger[row].run].syncs[name][ledger[row].k];
    const since = (row) => (ledger[row].k ? of(row, "step") - of(row - 1, "step") : null);
    const columns = [
      ...(several ? [{ title: "run", key: "run", cell: (row) => [dot(ledger[row].run), runs[ledger[row].run].name] }] : []),
      ...["version", "rollout", "step"].map((name) => ({ title: name, key: name, numeric: true, cell: (row) => number(of(row, name)) })),
      { title: "steps since", key: "since", numeric: true, cell: (row) => number(since(row)) },
      { title: "checksum", kind: "mono", cell: (row) => escaped(of(row, "checksum")) },
      { title: "size", key: "num_bytes", numeric: true, cell: (row) => (of(row, "num_bytes") === null ? "–" : bytes(of(row, "num_bytes"))) },
      { title: "took", key: "seconds", numeric: true, cell: (row) => duration(of(row, "seconds")) },
    ];
    const syncs = table({ id: "syncs", columns, count: ledger.length, size: 12, cards: true, order: (key) => (row) => (key === "run" ? ledger[row].run : key === "since" ? since(row) : of(row, key)) });
    syncs.node.style.marginTop = "14px";
    section.append(syncs.node);
    syncs.update();
  }

  // Completions

  const completions = (() => {
    const { prompts, columns: c } = data.completions;
    const count = c.run.length;
    if (!count) return { refresh() {} };
    const written = runs.reduce((sum, run) => sum + run.num_completions, 0);
    const section = sectionOf("Completions", written === count ? `All ${plural(count, "completion")} that the run wrote. Click a row to read the whole of it.`.replace("the run", several ? "the runs" : "the run") : `${whole(count)} of the ${whole(written)} completions on disk, in whole rollouts spread over the run: the page would grow too large. Click a row to read the whole of one.`);
    let query = (state.get("q") || "").toLowerCase(), group = state.get("group");
    const lower = { prompts: null, completions: null };
    const texts = () => {
      lower.prompts ??= prompts.map((text) => text.toLowerCase());
      lower.completions ??= c.completion.map((text) => text.toLowerCase());
    };
    const tests = {};
    const parse = (text) => {
      // 3   >0.5   <=2   1..4
      const clean = text.replaceAll("−", "-").replaceAll(" ", "");
      if (!clean) return null;
      const span = clean.match(/^(-?[\d.]+?)\.\.(-?[\d.]+)$/), one = clean.match(/^(>=|<=|>|<|=)?(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)$/i);
      if (span) return (x) => x !== null && x >= Number(span[1]) && x <= Number(span[2]);
      if (!one) return undefined;
      const bound = Number(one[2]);
      return { ">": (x) => x !== null && x > bound, ">=": (x) => x !== null && x >= bound, "<": (x) => x !== null && x < bound, "<=": (x) => x !== null && x <= bound }[one[1]] || ((x) => x === bound);
    };
    const read = (name, input) => {
      const test = parse(input.value);
      input.classList.toggle("bad", test === undefined);
      input.title = test === undefined ? "A number, or >0.5, <=2, 1..4" : "";
      tests[name] = test || null;
    };
    let timer = 0;
    const soon = () => { clearTimeout(timer); timer = setTimeout(() => view.update(true), 120); };
    const search = el("input", { class: "search", id: "search", type: "search", placeholder: "in prompts and completions", value: state.get("q") || "", oninput: () => { query = search.value.toLowerCase(); remember("q", search.value); soon(); } });
    const bars = ["rollout", "version", "lag", "reward", "advantage"].map((name) => {
      const input = el("input", { class: "short", id: `filter-${name}`, placeholder: { reward: ">0.5", lag: "0..4" }[name] || "any", value: state.get(`f.${name}`) || "", oninput: () => { read(name, input); remember(`f.${name}`, input.value); soon(); } });
      read(name, input);
      return el("label", {}, name, input);
    });
    const select = (name, label, options) => {
      const node = el("select", { id: `filter-${name}`, onchange: () => { remember(`f.${name}`, node.value); view.update(true); } }, options.map(([value, text]) => el("option", { value }, text)));
      node.value = state.get(`f.${name}`) || "";
      if (node.selectedIndex < 0) node.value = "";
      return [node, el("label", {}, label, node)];
    };
    const [ofRun, runLabel] = select("run", "run", [["", "all"], ...runs.map((run, i) => [String(i), run.name])]);
    const [live, liveLabel] = select("live", "trains", [["", "any"], ["yes", "yes"], ["no", "masked"]]);
    const groupChip = el("button", { class: "pill on", hidden: !group, title: "Show all again", onclick: () => { group = null; remember("group", ""); groupChip.hidden = true; view.update(true); } }, "one group ×");
    const clear = el("button", { class: "pill", id: "clear", onclick: () => {
      search.value = query = ""; group = null; groupChip.hidden = true;
      for (const name of ["q", "group"]) remember(name, "");
      for (const label of [...bars, runLabel, liveLabel]) { const input = label.lastChild; input.value = ""; remember(`f.${input.id.slice(7)}`, ""); if (input.tagName === "INPUT") read(input.id.slice(7), input); }
      view.update(true);
    } }, "clear");
    const keyOf = (row) => `${c.run[row]}.${c.rollout[row]}.${c.prompt[row]}`;
    const detail = (row) => [
      el("div", { class: "small" }, "prompt"), el("div", { class: "full" }, escaped(prompts[c.prompt[row]], query)),
      el("div", { class: "small" }, "completion"), el("div", { class: "full" }, escaped(c.completion[row], query)),
      el("button", { class: "pill", onclick: () => { group = keyOf(row); remember("group", group); groupChip.hidden = false; view.update(true); } }, "show its siblings"),
    ];
    const view = table({
      id: "completions", count, size: 20, detail, cards: true,
      order: (key) => (row) => (key === "prompt" ? prompts[c.prompt[row]] : c[key][row]),
      columns: [
        ...(several ? [{ title: "run", key: "run", kind: "name", cell: (row) => [dot(c.run[row]), runs[c.run[row]].name] }] : []),
        ...["rollout", "version", "lag"].map((name) => ({ title: name, key: name, numeric: true, cell: (row) => number(c[name][row]) })),
        { title: "reward", key: "reward", numeric: true, cell: (row) => (c.reward[row] === null ? "late" : number(c.reward[row])) },
        { title: "advantage", key: "advantage", numeric: true, cell: (row) => fixed(c.advantage[row], 3) + (c.live[row] === false ? " ∅" : "") },
        { title: "prompt", key: "prompt", kind: "text", cell: (row) => escaped(excerpt(prompts[c.prompt[row]], query), query) },
        { title: "completion", key: "completion", kind: "text", cell: (row) => escaped(excerpt(c.completion[row], query), query) },
      ],
    });
    view.keep = (row) => {
      if (hidden.has(c.run[row])) return false;
      if (ofRun.value && c.run[row] !== Number(ofRun.value)) return false;
      if (live.value && c.live[row] !== (live.value === "yes")) return false;
      if (group && keyOf(row) !== group) return false;
      for (const name in tests) if (tests[name] && !tests[name](c[name][row])) return false;
      if (!query) return true;
      texts();
      return lower.prompts[c.prompt[row]].includes(query) || lower.completions[row].includes(query);
    };
    section.append(el("div", { class: "toolbar" }, el("label", { class: "wide" }, "search", search), several ? runLabel : null, bars, liveLabel, groupChip, clear), view.node);
    if (c.live.some((flag) => flag === false)) section.append(el("p", { class: "small", style: "margin-top:6px" }, "∅: masked, it does not train."));
    view.update();
    return { refresh: () => view.update(true) };
  })();

  // Settings

  if (data.settings.length) {
    const section = sectionOf("Settings", several ? "What differs between the runs comes first; × marks a setting a run does not have." : "As of the last attempt at the run.");
    const differs = data.settings.map((row) => new Set(row.values).size > 1 && !["run", "trainer.default_root_dir"].includes(row.key));
    const rows = data.settings.map((_, i) => i).sort((a, b) => differs[b] - differs[a] || a - b);
    const find = el("input", { class: "search", id: "find-setting", type: "search", placeholder: "name or value", oninput: () => fill() });
    const only = el("input", { type: "checkbox", id: "only-differences", checked: several && differs.some(Boolean), onchange: () => fill() });
    const body = el("tbody");
    const cell = (row, i) => {
      const value = row.values[i], before = row.before[i];
      if (value === null) return el("td", { class: "none" }, "×");
      return el("td", { class: "mono" }, before === null ? "" : el("span", { class: "quiet" }, escaped(before), " → "), escaped(value));
    };
    const fill = () => {
      const wanted = find.value.toLowerCase();
      const chosen = rows.filter((i) => (!only.checked || differs[i]) && (!wanted || data.settings[i].key.toLowerCase().includes(wanted) || data.settings[i].values.some((v) => v !== null && v.toLowerCase().includes(wanted))));
      body.replaceChildren(...chosen.map((i) => el("tr", { class: several && differs[i] ? "differs" : "" }, el("td", { class: "mono" }, escaped(data.settings[i].key)), runs.map((_, k) => cell(data.settings[i], k)))));
      if (!chosen.length) body.append(el("tr", {}, el("td", { class: "none", colSpan: runs.length + 1 }, only.checked && !wanted ? "The runs have the same settings." : "Nothing fits.")));
    };
    section.append(
      el("div", { class: "toolbar" }, el("label", { class: "wide" }, "find", find), several ? el("label", { style: "display:flex;gap:6px;align-items:center;height:34px;font-size:14px" }, only, "only what differs") : null),
      el("div", { class: "scroller tall" }, el("table", { id: "settings" }, el("thead", {}, el("tr", {}, el("th", {}, "setting"), runs.map((run, i) => el("th", {}, several ? dot(i) : null, several ? run.name : "value")))), body)),
    );
    fill();
  }

  // The way around

  const nav = el("div");
  const sections = [...main.querySelectorAll("section")];
  const links = sections.map((section) => el("button", { onclick: () => section.scrollIntoView({ behavior: "smooth" }) }, section.dataset.title));
  nav.append(...links, el("span", { style: "flex:1" }), unzoom);
  document.getElementById("nav").append(nav);
  const here = () => {
    let current = 0;
    sections.forEach((section, i) => { if (section.getBoundingClientRect().top < 120) current = i; });
    if (innerHeight + scrollY >= document.documentElement.scrollHeight - 4) current = sections.length - 1;
    links.forEach((link, i) => link.classList.toggle("here", i === current));
  };
  addEventListener("scroll", here, { passive: true });
  here();

  const most = Math.max(...runs.map((run) => run.num_points));
  document.body.append(el("footer", {},
    el("p", { id: "thinned" }, most > data.most_points
      ? `Curves of up to ${whole(most)} points are drawn by at most ${whole(data.most_points)} of them: in every stretch of steps the lowest and the highest value as logged, so no spike is lost and nothing is averaged. Smoothed curves are means over all points before that. The CSV in the run folder has every one.`
      : "Every logged point is drawn."),
    el("p", {}, `Written ${new Date(data.made * 1000).toLocaleString("en-GB")} from ${runs.map((run) => run.path).join(", ")}. Charts: uPlot, MIT licence.`)));

  // Live

  try {
    const key = `lgrpo.scroll.${location.pathname}`;
    const y = sessionStorage.getItem(key);
    if (data.refresh && y !== null) scrollTo(0, Number(y));
    addEventListener("pagehide", () => sessionStorage.setItem(key, scrollY));
  } catch { /* no storage: the page starts at its top */ }
  if (data.refresh) {
    let typed = 0;
    addEventListener("keydown", () => { typed = Date.now(); });
    const again = () => {
      const busy = state.get("still") || Date.now() - typed < 4000 || !getSelection().isCollapsed || document.querySelector("tr.detail");
      if (busy) setTimeout(again, 1000); else location.reload();
    };
    setTimeout(again, data.refresh * 1000);
  }
  document.documentElement.dataset.ready = "yes";
}

unpack().then(show).catch((error) => {
  document.getElementById("page").replaceChildren(el("p", {}, typeof DecompressionStream === "undefined" ? "This browser is too old for the page: it needs one of 2023 or later." : `The page could not be drawn: ${error.message}`));
  throw error;
});
})();
