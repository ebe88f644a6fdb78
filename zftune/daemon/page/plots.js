// Plots of steps and knobs as SVG, drawn anew each time: they are small.
import { CAUSES, element, knownCause, msText, setText, stepMean, valueText } from "./words.js";

const MOST_POINTS = 160;
const LEFT = 44;
const BOTTOM = 20;
const TOP = 8;
const ALWAYS = ["topk_ratio", "update_interval", "apply_lag", "offload_ratio"];
const NAMES = {
  host: "host's update", h2d: "weights up (H2D)", d2h: "gradients down (D2H)", select: "selection",
  comm: "communication", data: "next batch", other: "other",
};

const shapes = document.getElementById("steps").namespaceURI;

function shape(tag, attributes, text) {
  const made = document.createElementNS(shapes, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// --- steps ---

export function drawSteps(svg, legend, steps) {
  const points = joined(steps.filter((one) => one.step_ms !== null));
  const causes = [...CAUSES, "other"].filter((cause) => points.some((one) => one.stalls[cause] > 0));
  const width = svg.clientWidth;
  const height = svg.clientHeight;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  showLegend(legend, causes, steps);
  if (!points.length) {
    svg.replaceChildren(shape("text", { class: "axis", x: 0, y: 20 }, "no step was reported yet"));
    return;
  }
  const first = points[0].step;
  const span = Math.max(1, points.at(-1).step - first);
  const ticks = ticksTo(Math.max(...points.map((one) => one.ms)));
  const most = ticks.at(-1);
  const x = (step) => LEFT + ((step - first) / span) * (width - LEFT - 2);
  const y = (ms) => TOP + (1 - ms / most) * (height - TOP - BOTTOM);
  const parts = [];
  for (const tick of ticks) {
    parts.push(shape("line", { class: "grid", x1: LEFT, x2: width, y1: y(tick), y2: y(tick) }));
    parts.push(shape("text", { class: "axis", x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, String(tick)));
  }
  parts.push(...areas(points, causes, x, y));
  const line = points.map((one) => `${x(one.step).toFixed(1)},${y(one.ms).toFixed(1)}`).join(" ");
  parts.push(shape("polyline", { class: "time", points: line }));
  parts.push(shape("text", { class: "axis", x: LEFT, y: height - 4 }, `step ${first}`));
  parts.push(shape("text", { class: "axis", x: width, y: height - 4, "text-anchor": "end" }, String(points.at(-1).step)));
  svg.replaceChildren(...parts);
}

function areas(points, causes, x, y) {
  const below = points.map(() => 0);
  return causes.map((cause) => {
    const lower = points.map((one, place) => `${x(one.step).toFixed(1)},${y(below[place]).toFixed(1)}`);
    points.forEach((one, place) => (below[place] += one.stalls[cause] ?? 0));
    const upper = points.map((one, place) => `${x(one.step).toFixed(1)},${y(below[place]).toFixed(1)}`);
    return shape("polygon", { class: `fill-${cause}`, points: [...lower, ...upper.reverse()].join(" ") });
  });
}

// Means of neighbours, so that there is a point for each few pixels.
function joined(steps) {
  const size = Math.ceil(steps.length / MOST_POINTS);
  const points = [];
  for (let begin = 0; begin < steps.length; begin += size) {
    const part = steps.slice(begin, begin + size);
    const stalls = {};
    for (const one of part)
      for (const [cause, ms] of Object.entries(one.stall_ms ?? {}))
        stalls[knownCause(cause)] = (stalls[knownCause(cause)] ?? 0) + ms / part.length;
    points.push({ step: part.at(-1).step, ms: stepMean(part), stalls });
  }
  return points;
}

function ticksTo(most) {
  const rough = Math.max(most, 1e-3) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const count = Math.ceil(most / size);
  return Array.from({ length: count + 1 }, (_, place) => Number((place * size).toPrecision(6)));
}

function showLegend(legend, causes, steps) {
  const known = steps.some((one) => one.stall_ms !== null);
  const words = ["step time", ...causes.map((cause) => NAMES[cause])];
  if (steps.length && !known) words.push("what it waits for is not known without a GPU stream");
  if (legend.dataset.words === words.join()) return;
  legend.dataset.words = words.join();
  const classes = ["step", ...causes];
  legend.replaceChildren(
    ...words.map((word, place) => {
      const swatch = place < classes.length ? [element("span", { class: `swatch fill-${classes[place]}` })] : [];
      return element("li", {}, [...swatch, word]);
    }),
  );
}

// --- knobs ---

export function drawKnobs(box, changes, lastStep) {
  const names = changes.length ? Object.keys(changes.at(-1).knobs) : [];
  const wanted = names.filter((name) => ALWAYS.includes(name) || valuesOf(changes, name).length > 1);
  if (!wanted.length) {
    box.replaceChildren(element("p", { class: "unit" }, ["none were reported yet"]));
    return;
  }
  const kept = new Map([...box.children].map((row) => [row.dataset.knob, row]));
  const rows = wanted.map((name) => kept.get(name) ?? newKnob(name));
  const first = changes[0].step;
  const last = Math.max(lastStep, changes.at(-1).step, first + 1);
  const span = element("p", { class: "span" }, [
    element("span", {}, [`step ${first}`]),
    element("span", {}, [String(last)]),
  ]);
  box.replaceChildren(...rows, span);
  for (const row of rows) drawKnob(row, changes, row.dataset.knob, first, last);
}

const valuesOf = (changes, name) => [...new Set(changes.map((one) => one.knobs[name]))];

function newKnob(name) {
  const svg = shape("svg", { role: "img" });
  const row = element("div", { class: "knob" }, [
    element("span", { class: "mono" }, [name, element("small")]),
    svg,
    element("span", { class: "now" }),
  ]);
  row.dataset.knob = name;
  return row;
}

function drawKnob(row, changes, name, first, last) {
  const svg = row.querySelector("svg");
  const values = valuesOf(changes, name);
  const now = changes.at(-1).knobs[name];
  const numeric = values.every((one) => typeof one === "number");
  const levels = numeric ? values : values.map((_, place) => place);
  const level = (value) => (numeric ? value : values.indexOf(value));
  const [least, most] = [Math.min(...levels), Math.max(...levels)];
  const width = svg.clientWidth;
  const height = svg.clientHeight;
  const x = (step) => (((step - first) / (last - first)) * width).toFixed(1);
  const y = (value) => (most === least ? height / 2 : height - 8 - ((level(value) - least) / (most - least)) * (height - 16)).toFixed(1);
  let path = "";
  for (const [place, one] of changes.entries())
    path += place ? `H${x(one.step)}V${y(one.knobs[name])}` : `M${x(one.step)},${y(one.knobs[name])}`;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const range = most === least ? "unchanged" : numeric ? `between ${valueText(least)} and ${valueText(most)}` : "changed";
  svg.setAttribute("aria-label", `${name} since step ${first}: ${range}, now ${valueText(now)}`);
  svg.replaceChildren(shape("path", { class: "line", d: `${path}H${width}` }));
  setText(row.querySelector(".now"), valueText(now));
  setText(row.querySelector("small"), most === least ? "" : numeric ? `${valueText(least)} to ${valueText(most)}` : "");
}
