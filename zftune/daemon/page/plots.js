// Plots of a run, by plotly.js. Their text has no markup: the page's content policy forbids inline styles.
import { CAUSES } from "./tables.js";
import { knownCause, stepMean, valueText } from "./words.js";

const MOST_POINTS = 160;
const MOST_MARKS = 60;
const ALWAYS = ["topk_ratio", "update_interval", "apply_lag", "offload_ratio"];
const CONFIG = { displayModeBar: false, responsive: true };
const GAP = 30; // pixels between the rows of a figure: room for a title
const drawn = new WeakMap();

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

// Draws anew only where something is new, so that a pointer's box stays.
function draw(place, traces, layout) {
  const text = JSON.stringify([traces, layout]);
  if (drawn.get(place) === text) return;
  drawn.set(place, text);
  window.Plotly.react(place, traces, layout, CONFIG);
}

function shared(height, more) {
  return {
    height, margin: { l: 56, r: 10, t: 24, b: 40 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { family: "system-ui, sans-serif", size: 12, color: colour("text") },
    hoverlabel: { bgcolor: colour("raised"), bordercolor: colour("line"), font: { color: colour("text") } },
    hovermode: "x unified", dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", showlegend: false,
    ...more,
  };
}

const axis = (more) => ({
  gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, automargin: false, nticks: 5, ...more,
});
const stepAxis = (more) => axis({ title: { text: "step", standoff: 4 }, tickformat: ",d", nticks: 6, ...more });
const title = (text, y) => ({
  text, x: 0, xref: "paper", xanchor: "left", y, yref: "paper", yanchor: "bottom", yshift: 4, showarrow: false,
});

// --- the last steps ---

export function drawSteps(place, run, steps) {
  const points = joined(steps.filter((one) => one.step_ms !== null));
  const x = points.map((one) => one.step);
  const causes = [...Object.keys(CAUSES), "other"].filter((cause) => points.some((one) => one.stalls[cause] > 0));
  const traces = causes.map((cause) => ({
    name: CAUSES[cause] ?? cause, x, y: points.map((one) => one.stalls[cause] ?? 0), mode: "none", stackgroup: "waits",
    fillcolor: colour(cause), hovertemplate: "%{y:.1f} ms",
  }));
  const line = { color: colour("text"), width: 1.5 };
  traces.push({ name: "step time", x, y: points.map((one) => one.ms), mode: "lines", line, hovertemplate: "%{y:.1f} ms" });
  draw(place, traces, shared(320, {
    uirevision: run.run, xaxis: stepAxis(), yaxis: axis({ rangemode: "tozero" }), annotations: [title("ms", 1)],
    showlegend: true, legend: { orientation: "h", x: 0, y: -0.2, yanchor: "top", traceorder: "reversed" },
  }));
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

// --- the whole run ---

export function drawCourse(place, { run, curve, changes }) {
  const rows = [
    curveRow(curve, "step_ms", "step time, ms", ".1f"),
    curveRow(curve, "loss", "loss", ".4~g"),
    curveRow(curve, "coverage", "coverage: share of the gradient in the selected columns", ".0%"),
    ...knobRows(changes, run.step),
  ].filter((row) => row !== null);
  const size = rows.reduce((sum, row) => sum + row.height + GAP, -GAP);
  const layout = shared(size + 64, { uirevision: run.run, annotations: [], hoversubplots: "axis" });
  let top = 1;
  rows.forEach((row, place) => {
    const number = place ? place + 1 : "";
    const bottom = Math.max(0, top - row.height / size);
    layout[`yaxis${number}`] = axis({ domain: [bottom, top], nticks: 4, ...row.axis });
    layout.annotations.push(title(row.title, top));
    row.trace.yaxis = `y${number}`;
    top = bottom - GAP / size;
  });
  layout.xaxis = stepAxis({ anchor: `y${rows.length > 1 ? rows.length : ""}` });
  layout.shapes = changes.slice(1).slice(-MOST_MARKS).map(({ step }) => ({
    type: "line", x0: step, x1: step, yref: "paper", y0: 0, y1: 1, layer: "below", line: { color: colour("quiet"), width: 0.6, dash: "dot" },
  }));
  draw(place, rows.map((row) => row.trace), layout);
}

function curveRow(curve, name, title, format) {
  const points = curve.filter((one) => (one[name] ?? null) !== null);
  if (!points.length) return null;
  const line = { color: colour(name === "step_ms" ? "text" : "accent"), width: 1.5 };
  const [x, y] = [points.map((one) => one.step), points.map((one) => one[name])];
  const trace = { name: title.split(/[,:]/)[0], x, y, mode: points.length > 1 ? "lines" : "markers", line };
  return { title, height: 96, axis: name === "step_ms" ? { rangemode: "tozero" } : {}, trace: { ...trace, hovertemplate: `%{y:${format}}` } };
}

function knobRows(changes, lastStep) {
  const names = changes.length ? Object.keys(changes.at(-1).knobs) : [];
  const wanted = names.filter((name) => ALWAYS.includes(name) || valuesOf(changes, name).length > 1);
  return wanted.map((name) => knobRow(name, changes, lastStep));
}

const valuesOf = (changes, name) => [...new Set(changes.map((one) => one.knobs[name]))];

function knobRow(name, changes, lastStep) {
  const values = valuesOf(changes, name);
  const numeric = values.every((one) => typeof one === "number");
  const level = (value) => (numeric ? value : values.indexOf(value));
  const held = [...changes, { step: Math.max(lastStep, changes.at(-1).step), knobs: changes.at(-1).knobs }];
  const ends = [...new Set([Math.min(...values.map(level)), Math.max(...values.map(level))])];
  const ticktext = ends.map((end) => plain(valueText(values.find((one) => level(one) === end))));
  return {
    title: plain(`${name} ${valueText(changes.at(-1).knobs[name])}`),
    height: 30,
    axis: { tickvals: ends, ticktext, range: [ends[0] - spare(ends), ends.at(-1) + spare(ends)] },
    trace: {
      name: plain(name), x: held.map((one) => one.step), y: held.map((one) => level(one.knobs[name])), mode: "lines",
      line: { color: colour("accent"), width: 2, shape: "hv" },
      customdata: held.map((one) => plain(valueText(one.knobs[name]))), hovertemplate: "%{customdata}",
    },
  };
}

const spare = (ends) => (ends.at(-1) - ends[0]) * 0.2 || 1;
