// Links to the sections, and the footer.
// Defines: showNavigation, showFooter.

function showNavigation(page) {
  const sections = [...document.querySelectorAll("#page section")];
  const links = sections.map((section) => {
    const scroll = () => section.scrollIntoView({ behavior: "smooth" });
    return el("button", { onclick: scroll }, section.dataset.title);
  });
  const bar = el("div", {}, links, el("span", { style: "flex:1" }), zoomOutButton(page));
  document.getElementById("nav").append(bar);
  const markCurrent = () => {
    const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 4;
    const passed = sections.filter((section) => section.getBoundingClientRect().top < 120).length;
    const current = atEnd ? sections.length - 1 : Math.max(0, passed - 1);
    links.forEach((link, i) => link.classList.toggle("here", i === current));
  };
  addEventListener("scroll", markCurrent, { passive: true });
  markCurrent();
}

function showFooter({ data, runs }) {
  const longest = Math.max(...runs.map((run) => run.num_points));
  const limits = `up to ${whole(longest)} points are downsampled to at most ${whole(data.max_points)}`;
  const downsampled = `Curves of ${limits}: ` +
    "the lowest and the highest logged value of each interval of steps, so that no spike is lost and nothing is " +
    "averaged. Smoothed curves are computed from all points. The CSV files in the run folder have every point.";
  const written = new Date(data.made * 1000).toLocaleString("en-GB"), paths = runs.map((run) => run.path).join(", ");
  document.body.append(el("footer", {},
    el("p", { id: "downsampled" }, longest > data.max_points ? downsampled : "Every logged point is drawn."),
    el("p", {}, `Written ${written} from ${paths}. Charts: uPlot, MIT licence.`)));
}
