// Elements of the page. Text that comes from a run is always inserted as a text node, never as markup.
// Defines: el, colour, palette, dot, addSection, escaped, excerpt.

function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => !isMissing(child) && child !== false));
  return node;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const palette = (i) => colour(`--c${i % 8}`);

function dot(i) {
  const node = el("i", { class: "dot" });
  node.style.background = `var(--c${i % 8})`;
  return node;
}

function addSection(title, note) {
  const heading = [el("h2", {}, title), note ? el("p", { class: "note" }, note) : null];
  const section = el("section", { data: { title } }, heading);
  document.getElementById("page").append(section);
  return section;
}

// Control characters, invisible characters, changes of direction, and lone halves of surrogate pairs.
const UNPRINTABLE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff]" +
  "|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]", "g");

// Nodes for a text: unprintable characters are written as \uXXXX, matches of the query are highlighted.
function escaped(text, query) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(UNPRINTABLE)) {
    nodes.push(...highlighted(text.slice(end, match.index), query));
    nodes.push(el("span", { class: "esc" }, `\\u${match[0].charCodeAt(0).toString(16).padStart(4, "0")}`));
    end = match.index + match[0].length;
  }
  nodes.push(...highlighted(text.slice(end), query));
  return nodes;
}

function highlighted(text, query) {
  if (!query) return [text];
  const nodes = [], lower = text.toLowerCase();
  let from = 0;
  for (let found = lower.indexOf(query); found >= 0; found = lower.indexOf(query, from)) {
    nodes.push(text.slice(from, found), el("mark", {}, text.slice(found, found + query.length)));
    from = found + query.length;
  }
  return [...nodes, text.slice(from)];
}

// At most 320 characters of a text, around the first match of the query.
function excerpt(text, query) {
  const length = 320;
  if (text.length <= length) return text;
  const found = query ? text.toLowerCase().indexOf(query) : -1;
  const start = found > 90 ? found - 40 : 0; // the cell shows three lines: keep the match among them
  return (start ? "…" : "") + text.slice(start, start + length) + (start + length < text.length ? "…" : "");
}
