// Light or dark: the system's choice unless the reader chose one.
// Defines: applyTheme, themeButton.

const systemDark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const chosen = saved.get("theme");
  const isPrinting = document.documentElement.classList.contains("printing"); // paper is white
  const isDark = isPrinting ? false : chosen ? chosen === "dark" : systemDark.matches;
  document.documentElement.classList.toggle("dark", isDark);
  document.documentElement.style.colorScheme = isDark ? "dark" : "light";
}

// Charts are drawn on a canvas with the colours of the theme, so a change redraws them.
function themeButton(page) {
  const label = () => `${saved.get("theme") || "auto"} theme`;
  const change = () => { applyTheme(); redrawCharts(page); };
  const button = el("button", { class: "pill", id: "theme", onclick: () => {
    const next = { auto: "light", light: "dark", dark: "" };
    remember("theme", next[saved.get("theme") || "auto"]);
    button.textContent = label();
    change();
  } }, label());
  systemDark.addEventListener("change", change);
  return button;
}
