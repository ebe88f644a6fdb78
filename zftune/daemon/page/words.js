// Figures in words, and elements whose text is text.

export const CAUSES = ["host", "h2d", "d2h", "select", "comm", "data"];
const SHORT = { topk_ratio: "k", update_interval: "S", apply_lag: "L", offload_ratio: "r" };

export function element(tag, attributes = {}, children = []) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const knownCause = (cause) => (CAUSES.includes(cause) ? cause : "other");

export function msText(ms, unit = "") {
  if (ms === null || ms === undefined) return "–";
  return (ms < 10 ? ms.toFixed(2) : ms < 1000 ? ms.toFixed(1) : ms.toFixed(0)) + unit;
}

export const shareText = (share) => `${(100 * share).toFixed(0)}%`;

export function gainText(gain) {
  return gain ? `${(100 * gain.share).toFixed(1)} ± ${(100 * gain.error).toFixed(1)}%` : "–";
}

export function valueText(value) {
  if (value === null) return "all cores";
  if (typeof value === "boolean") return value ? "on" : "off";
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value);
}

export function knobsText(knobs) {
  return Object.keys(SHORT)
    .filter((knob) => knob in knobs)
    .map((knob) => `${SHORT[knob]} ${valueText(knobs[knob])}`)
    .join("  ");
}

export function stallsOf(run) {
  if (!run.step_ms) return [];
  const found = Object.entries(run.stall_ms).filter(([, ms]) => ms > 0);
  return found.map(([cause, ms]) => [cause, ms / run.step_ms]).sort((one, other) => other[1] - one[1]);
}

export function stepMean(steps) {
  const times = steps.map((one) => one.step_ms).filter((ms) => ms !== null);
  return times.length ? times.reduce((sum, ms) => sum + ms, 0) / times.length : null;
}
