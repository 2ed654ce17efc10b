"use strict";
// Asks the server for what has changed, twice a second, and shows it.

const SECOND = 1000; // milliseconds
const NEXT = SECOND / 2; // after an answer
const AGAIN = 5 * SECOND; // after a question without an answer
const page = document.getElementById("page");
const connection = document.getElementById("connection");
let chosenView = ""; // by the reader; "": the newest
let shownView = "", version = 0, drawnTrial = "";
let lost = ""; // when the connection was

// Turns one tree of elements into another, keeping what is the same: focus, scrolling and drawn figures stay.
function morph(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE || old.classList.contains("figure")) return;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const named = new Map([...old.children].filter((child) => child.id).map((child) => [child.id, child]));
  let at = old.firstChild;
  for (const next of [...fresh.childNodes]) {
    const alike = at && !at.id && at.nodeName === next.nodeName;
    const same = next.id ? named.get(next.id) : alike ? at : null;
    if (!same) {
      old.insertBefore(next, at);
      continue;
    }
    if (same === at) at = at.nextSibling;
    else old.insertBefore(same, at);
    morph(same, next);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function show(changes) {
  if (shownView !== changes.view) REPORT.figures = REPORT.timelines = {};
  [shownView, version] = [changes.view, changes.version];
  REPORT.figures = { ...REPORT.figures, ...changes.figures };
  REPORT.timelines = { ...REPORT.timelines, ...changes.timelines };
  if (changes.html !== undefined) showText(changes.html);
  const isNew = (id) => !document.getElementById(id).classList.contains("js-plotly-plot");
  for (const [id, figure] of Object.entries(REPORT.figures)) {
    if (!document.getElementById(id)) delete REPORT.figures[id]; // the section is gone
    else if (id in changes.figures || isNew(id)) draw(id, figure);
  }
  const trial = document.getElementById("trial");
  if (trial && (trial.value in changes.timelines || trial.value !== drawnTrial || isNew("workers"))) {
    drawnTrial = trial.value;
    drawTrial();
  }
}

function showText(html) {
  const fresh = document.createElement("div");
  fresh.id = "page";
  fresh.innerHTML = html;
  morph(page, fresh);
  document.title = `${document.querySelector("h1").textContent} · Torrential`;
  const view = document.getElementById("view");
  if (view) view.value = shownView;
  showChoices();
}

function say(words) {
  connection.textContent = words;
  connection.hidden = !words;
}

async function ask() {
  const asked = new URLSearchParams({ view: chosenView, shown: shownView, version });
  const place = location.pathname.replace(/\/?$/, "/");
  const answer = await fetch(`${place}changes?${asked}`, { signal: AbortSignal.timeout(30 * SECOND) });
  if (!answer.ok) throw new Error(`the server says ${answer.status}`);
  return answer.json();
}

async function follow() {
  let wait = NEXT;
  try {
    const changes = await ask();
    show(changes);
    lost = "";
    if (changes.last) {
      say("The run has ended, and with it the server of this page: this is its last state.");
      return;
    }
    say(changes.behind ? "Reading the records …" : "");
    if (changes.behind) wait = 0;
  } catch (error) {
    lost ||= new Date().toLocaleTimeString();
    say(`No connection to the server since ${lost}; what is shown is from then. (${error.message})`);
    wait = AGAIN;
  }
  setTimeout(follow, wait);
}

document.addEventListener("change", ({ target }) => {
  if (target.id === "view") chosenView = target.value;
});

follow();
