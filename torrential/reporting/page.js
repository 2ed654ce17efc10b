"use strict";
// Draws REPORT.figures and one of REPORT.timelines; hides and shows what legends name; follows the theme.
// Listens on the whole document, since the live page replaces its parts.

const root = document.documentElement;
const NARROW_LETTERS = 46;
const hidden = new Set();
let chosenTrial = ""; // by the reader
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
    uirevision: "kept", // what the reader has zoomed into stays
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

function drawTrial() {
  const trial = document.getElementById("trial");
  return trial ? draw("workers", REPORT.timelines[trial.value]) : null;
}

function drawAll() {
  return Promise.all([...Object.entries(REPORT.figures).map(([id, figure]) => draw(id, figure)), drawTrial()]);
}

// What the reader has chosen, on a page that may be new.
function showChoices() {
  const theme = document.getElementById("theme"), trial = document.getElementById("trial");
  if (theme) theme.textContent = root.dataset.theme === "dark" ? "Light" : "Dark";
  for (const button of document.querySelectorAll("[data-key]"))
    button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.key)));
  if (trial) trial.value = chosenTrial in REPORT.timelines ? chosenTrial : trial.dataset.first;
  for (const list of document.querySelectorAll("[data-trial]")) list.hidden = list.dataset.trial !== trial.value;
}

function setTheme(theme) {
  root.dataset.theme = theme;
  showChoices();
  return drawAll();
}

prefersDark.addEventListener("change", () => setTheme(prefersDark.matches ? "dark" : "light"));

document.addEventListener("click", ({ target }) => {
  if (target.id === "theme") setTheme(root.dataset.theme === "dark" ? "light" : "dark");
  const button = target.closest("[data-key]");
  if (!button) return;
  if (!hidden.delete(button.dataset.key)) hidden.add(button.dataset.key);
  showChoices();
  drawAll();
});

document.addEventListener("change", ({ target }) => {
  if (target.id !== "trial") return;
  chosenTrial = target.value;
  showChoices();
  drawTrial();
}, true);

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
