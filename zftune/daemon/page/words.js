// Figures in words, and elements whose text is text. The tables of words are the package's own: zftune/words.py.
import { CAUSES, LETTERS, NONE, USUAL } from "./tables.js";

export function element(tag, attributes = {}, children = []) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const knownCause = (cause) => (cause in CAUSES ? cause : "other");

export function msText(ms, unit = "") {
  if (ms === null || ms === undefined) return NONE;
  return (ms < 10 ? ms.toFixed(2) : ms < 1000 ? ms.toFixed(1) : ms.toFixed(0)) + unit;
}

export const secondsText = (s) => `${s < 10 ? s.toFixed(2) : s < 1000 ? s.toFixed(1) : s.toFixed(0)} s`;

export const shareText = (share) => `${(100 * share).toFixed(0)}%`;

export function valueText(value) {
  if (value === null) return "default";
  if (typeof value === "boolean") return value ? "on" : "off";
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value);
}

export function knobsText(knobs) {
  const names = [...Object.keys(LETTERS).filter((name) => name in knobs), ...Object.keys(knobs).filter((name) => !(name in LETTERS))];
  const shown = names.filter((name) => !(name in USUAL) || knobs[name] !== USUAL[name]);
  return shown.map((name) => `${LETTERS[name] ?? name} ${valueText(knobs[name])}`).join("  ");
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
