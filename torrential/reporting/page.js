"use strict";
// Draws REPORT.figures and one of REPORT.timelines; hides and shows what legends name; follows the theme.

const root = document.documentElement;
const themeButton = document.getElementById("theme");
const trial = document.getElementById("trial");
const NARROW_LETTERS = 46;
const hidden = new Set();
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function colour(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

// In two lines where a phone has no room for one.
function wrapped(text) {
  const at = text.length > NARROW_LETTERS ? text.lastIndexOf(" ", NARROW_LETTERS) : -1;
  return at > 0 ? text.slice(0, at) + "<br>" + text.slice(at + 1) : text;
}

// What every figure has in common; a figure's own layout comes on top of it.
function dressed(own, narrow) {
  const text = colour("--text"), line = colour("--line");
  const size = narrow ? 11 : 13;
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line, automargin: true };
  const dress = (given) => ({ ...axis, ...given, title: { ...given.title, font: { size } } });
  const layout = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: { family: getComputedStyle(document.body).fontFamily, size, color: text },
    margin: { l: 12, r: 12, t: 26, b: 12 }, dragmode: narrow ? false : "zoom",
    hoverlabel: { bgcolor: colour("--panel"), bordercolor: line, font: { color: text }, namelength: -1, align: "left" },
    ...own,
    xaxis: dress(own.xaxis), yaxis: dress(own.yaxis),
  };
  layout.shapes = (own.shapes || []).map((shape) => ({ ...shape, line: { ...shape.line, color: text } }));
  layout.annotations = (own.annotations || []).map((words) => ({
    ...words, bgcolor: colour("--back"), text: narrow ? wrapped(words.text) : words.text,
  }));
  return layout;
}

function draw(id, figure) {
  const place = document.getElementById(id);
  const traces = figure.data.map((trace) => ({ ...trace, visible: !hidden.has(trace.meta) }));
  const options = { responsive: true, displaylogo: false, displayModeBar: false };
  return Plotly.react(place, traces, dressed(figure.layout, place.clientWidth < 600), options);
}

function drawAll() {
  const drawn = Object.entries(REPORT.figures).map(([id, figure]) => draw(id, figure));
  if (trial) drawn.push(draw("workers", REPORT.timelines[trial.value]));
  return Promise.all(drawn);
}

function setTheme(theme) {
  root.dataset.theme = theme;
  themeButton.textContent = theme === "dark" ? "Light" : "Dark";
  return drawAll();
}

themeButton.addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
prefersDark.addEventListener("change", () => setTheme(prefersDark.matches ? "dark" : "light"));

for (const button of document.querySelectorAll("[data-key]")) {
  button.addEventListener("click", () => {
    const key = button.dataset.key;
    if (!hidden.delete(key)) hidden.add(key);
    for (const same of document.querySelectorAll("[data-key]"))
      same.setAttribute("aria-pressed", String(!hidden.has(same.dataset.key)));
    drawAll();
  });
}

if (trial) {
  trial.addEventListener("change", () => {
    for (const list of document.querySelectorAll("[data-trial]")) list.hidden = list.dataset.trial !== trial.value;
    draw("workers", REPORT.timelines[trial.value]);
  });
}

// Paper is white and narrower than most screens.
let onScreen = null;
addEventListener("beforeprint", () => {
  onScreen = root.dataset.theme;
  setTheme("light");
  for (const place of document.querySelectorAll(".figure")) Plotly.relayout(place, { width: 700, autosize: false });
});
addEventListener("afterprint", () => {
  for (const place of document.querySelectorAll(".figure")) Plotly.relayout(place, { width: null, autosize: true });
  setTheme(onScreen);
});

setTheme(prefersDark.matches ? "dark" : "light").then(() => { root.dataset.drawn = "true"; });
