// Asks the daemon once a second and shows what it says. Text of runs is only ever set as text.
import { drawCourse, drawSteps } from "./plots.js";
import { NONE, TRENDS } from "./tables.js";
import { element, knobsText, knownCause, msText, secondsText, setText, shareText, stallsOf, stepMean } from "./words.js";

const PERIOD_MS = 1000;
const PATIENCE_MS = 8000;
const ARMED_MS = 5000;
const MOST_DECISIONS = 200;
const MOST_CAUSES = 3;
const UNSEEN = new Set(["rejected", "planned"]);
const ALLOWED = {
  pause: (details) => !["paused", "ended"].includes(details.run.state),
  resume: (details) => details.run.state === "paused",
  rollback: (details) => details.run.state !== "ended" && details.gain !== null,
  stop: (details) => details.run.state !== "ended",
};
const AGAIN = { rollback: "Really roll back?", stop: "Really stop?" }; // neither can be undone

const at = (id) => document.getElementById(id);
const buttons = [...document.querySelectorAll("#buttons button")];
const labels = new Map(buttons.map((button) => [button, button.textContent]));
let chosen = decodeURIComponent(location.hash.slice(1));
let shown = null; // the details on the page
let asking = 0; // number of the newest question: an answer to an older one is late
let timer = null;
let disarm = null;

async function ask(path, options = {}) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS), ...options });
  const found = await answer.json();
  if (!answer.ok) throw new Refusal(found.error, answer.status);
  return found;
}

class Refusal extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

async function look() {
  clearTimeout(timer);
  const number = ++asking;
  try {
    const runs = await ask("/v1/runs");
    const known = runs.some((one) => one.run === chosen);
    const live = runs.filter((one) => one.state !== "ended");
    const wanted = known ? chosen : ((live.length ? live : runs).at(-1)?.run ?? "");
    const details = wanted ? await ask(`/v1/runs/${encodeURIComponent(wanted)}`) : null;
    if (number !== asking) return;
    chosen = wanted;
    show(runs, details);
    tellDaemon(`${live.length} ${live.length === 1 ? "run" : "runs"}`, false);
  } catch (error) {
    if (number !== asking) return;
    tellDaemon(error instanceof Refusal ? error.message : "the daemon does not answer; what is below is old", true);
  }
  timer = setTimeout(look, PERIOD_MS);
}

function tellDaemon(sentence, lost) {
  setText(at("daemon"), sentence);
  at("daemon").classList.toggle("lost", lost);
  for (const button of buttons) button.disabled = lost || !shown || !ALLOWED[button.dataset.command](shown);
}

function show(runs, details) {
  shown = details;
  at("no-run").hidden = runs.length > 0;
  showRuns([...runs].reverse());
  at("run").hidden = details === null;
  if (details) showRun(details);
}

// --- the overview ---

function showRuns(runs) {
  const list = at("runs");
  const kept = new Map([...list.children].map((item) => [item.dataset.run, item]));
  runs.forEach((run, place) => {
    const item = kept.get(run.run) ?? newItem(run.run);
    kept.delete(run.run);
    if (list.children[place] !== item) list.insertBefore(item, list.children[place] ?? null);
    fillItem(item, run);
  });
  for (const gone of kept.values()) gone.remove();
}

function newItem(name) {
  const button = element("button", {}, [
    element("span", { class: "head" }, [
      element("span", { class: "name" }),
      element("span", { class: "mono" }),
    ]),
    element("span", { class: "state" }),
    element("span", { class: "bar", role: "img" }),
    element("span", { class: "small waits" }),
    element("span", { class: "small time" }),
  ]);
  button.type = "button";
  button.addEventListener("click", () => choose(name));
  const item = element("li", {}, [button]);
  item.dataset.run = name;
  return item;
}

// As zftune explain knows it, or before it is in the store as the daemon does.
function idOf(run) {
  return (run.record ?? run.run).slice(0, 8);
}

function fillItem(item, run) {
  const part = (name) => item.querySelector(`.${name}`);
  item.firstChild.setAttribute("aria-pressed", String(run.run === chosen));
  setText(part("name"), run.model || "a run");
  setText(part("mono"), idOf(run));
  setText(part("state"), run.title);
  part("state").className = `state ${run.state}`;
  const stalls = stallsOf(run);
  const words = stalls.slice(0, MOST_CAUSES).map(([cause, share]) => `${cause} ${shareText(share)}`).join(", ");
  const unknown = run.step_ms === null ? "no step yet" : "waiting is not known without a GPU stream";
  setText(part("waits"), stalls.length ? `waits for ${words}` : Object.keys(run.stall_ms).length ? "no waiting" : unknown);
  setText(part("time"), run.step_ms === null ? "" : `${msText(run.step_ms)} ms`);
  part("bar").setAttribute("aria-label", stalls.length ? `share of a step that waits: ${words}` : unknown);
  fillBar(part("bar"), stalls);
}

function fillBar(bar, stalls) {
  while (bar.children.length > stalls.length) bar.lastChild.remove();
  stalls.forEach(([cause, share], place) => {
    const span = bar.children[place] ?? bar.appendChild(element("span"));
    span.className = `fill-${knownCause(cause)}`;
    span.style.width = `${Math.min(100, 100 * share)}%`;
  });
}

function choose(name) {
  chosen = name;
  history.replaceState(null, "", `#${encodeURIComponent(name)}`);
  at("refusal").hidden = true;
  rest();
  look();
}

// --- one run ---

function showRun(details) {
  const { run } = details;
  setText(at("run-title"), `${run.model || "a run"} · ${idOf(run)}`);
  setText(at("command"), run.argv.join(" "));
  fillWhenOther(at("state"), [[run.state, run.title, run.reason]], ([state, title, reason]) =>
    element("span", {}, [element("span", { class: `state ${state}` }, [title]), reason ? `: ${reason}` : ""]),
  );
  const warnings = run.coverage?.warning ? [run.coverage.warning] : [];
  fillWhenOther(at("notices"), [...run.notices, ...warnings], (one) => element("li", {}, [one]));
  showFigures(details);
  showPlots(details);
  const decisions = details.decisions.slice(-MOST_DECISIONS).reverse();
  fillWhenOther(at("decisions"), decisions, decisionItem);
  showTrials(details);
}

function showPlots({ run, steps, curve, changes }) {
  const known = steps.some((one) => one.step_ms !== null);
  const waits = steps.some((one) => one.stall_ms !== null);
  at("no-steps").hidden = known;
  at("no-waits").hidden = !known || waits;
  for (const name of ["steps", "course"]) at(name).parentElement.hidden = !known;
  if (!known) return;
  drawSteps(at("steps"), run, steps);
  drawCourse(at("course"), { run, curve, changes });
}

function showFigures({ run, gain, steps, trials, decisions }) {
  const waiting = stallsOf(run).reduce((sum, [, share]) => sum + share, 0);
  const known = Object.keys(run.stall_ms).length > 0;
  const timed = trials.filter((one) => one.step_ms !== null);
  const measured = new Set(timed.map((one) => JSON.stringify(one.knobs))).size; // one that is tried again is one
  const none = decisions.some((one) => one.kind === "adopt") ? "what was adopted was taken back" : "nothing was adopted";
  const figures = [
    ["step", String(run.step), run.silent_s > 5 ? `not heard of for ${run.silent_s.toFixed(0)} s` : `${run.ranks}, pid ${run.pid}`],
    ["step time", msText(run.step_ms ?? stepMean(steps), " ms"), "median of the last steps"],
    ["waiting", known ? shareText(waiting) : NONE, run.gpu ? run.gpu.sentence : known ? "of the step" : "not known without a GPU stream"],
    ["gain", gain ? gain.text : NONE, gain ? `against ${gain.over}` : none],
    ["exploring cost", secondsText(run.account.spent_s), `of ${secondsText(run.account.elapsed_s)} so far; ${run.account.saved}`],
    ["loss", run.loss === null ? NONE : run.loss.toPrecision(4), run.losses ? TRENDS[run.losses.trend] : "none is reported"],
    ["settings measured", String(measured), "with the one at the start"],
  ];
  fillWhenOther(at("figures"), figures, ([title, value, more]) =>
    element("div", {}, [element("dt", {}, [title]), element("dd", {}, [value, element("small", {}, [more])])]),
  );
}

function decisionItem(one) {
  return element("li", {}, [
    element("time", { class: "at", datetime: new Date(1000 * one.at_unix_s).toISOString() }, [clock(one.at_unix_s)]),
    element("span", { class: `kind ${/^[a-z]+$/.test(one.kind) ? one.kind : ""}` }, [one.title]),
    element("span", { class: "why" }, [one.reason]),
  ]);
}

const clock = (unix_s) => new Date(1000 * unix_s).toLocaleTimeString([], { hour12: false });

function showTrials({ trials, incumbent }) {
  const seen = trials.filter((one) => !UNSEEN.has(one.state)).reverse();
  const rows = seen.map((one) => ({ ...one, best: one.number === incumbent }));
  fillWhenOther(at("trials"), rows, trialRow);
}

function trialRow(one) {
  return element("tr", { class: one.best ? "best" : "" }, [
    element("td", {}, [String(one.number)]),
    element("td", {}, [one.best ? "the best" : one.fate]),
    element("td", { class: "number" }, [msText(one.step_ms)]),
    element("td", { class: "knobs" }, [knobsText(one.knobs)]),
    element("td", {}, [one.source]),
    element("td", { class: "reason" }, [one.reason ?? ""]),
  ]);
}

const filled = new WeakMap();

// What stays the same is left alone, so that it can be selected, and read aloud to its end.
function fillWhenOther(parent, rows, make) {
  const text = JSON.stringify(rows);
  if (filled.get(parent) === text) return;
  filled.set(parent, text);
  parent.replaceChildren(...rows.map(make));
}

// --- commands ---

function rest() {
  clearTimeout(disarm);
  disarm = null;
  for (const [button, label] of labels) {
    delete button.dataset.armed;
    setText(button, label);
  }
}

function isMeant(button) {
  const question = AGAIN[button.dataset.command];
  if (!question || button.dataset.armed) return true;
  rest();
  button.dataset.armed = "yes";
  setText(button, question);
  disarm = setTimeout(rest, ARMED_MS);
  return false;
}

async function tell(button) {
  if (!shown || !isMeant(button)) return;
  rest();
  const { run } = shown.run;
  button.disabled = true;
  try {
    await ask(`/v1/runs/${encodeURIComponent(run)}/${button.dataset.command}`, { method: "POST" });
    at("refusal").hidden = true;
  } catch (error) {
    setText(at("refusal"), error instanceof Refusal ? error.message : "the daemon does not answer");
    at("refusal").hidden = false;
  }
  look();
}

for (const button of buttons) button.addEventListener("click", () => tell(button));
look();
