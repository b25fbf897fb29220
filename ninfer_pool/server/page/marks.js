// Draws an entry's checkpoints on its length, one shape for each kind.

import { svg } from "./dom.js";
import { count } from "./words.js";

const SHAPES = {
  system: "M-4-4H4V4H-4Z",
  history: "M-2-5H2V5H-2Z",
  turn: "M0-5L5 4H-5Z",
  response: "M0-5.5L5.5 0L0 5.5L-5.5 0Z",
  junction: "M-1.3-5H1.3V-1.3H5V1.3H1.3V5H-1.3V1.3H-5V-1.3H-1.3Z",
  grid: "M0-2.5A2.5 2.5 0 1 1 0 2.5A2.5 2.5 0 1 1 0-2.5Z",
  frontier: "M0-4.5A4.5 4.5 0 1 1 0 4.5A4.5 4.5 0 1 1 0-4.5Z",
};
const HEIGHT = 46;
const BASE = 38; // where the length is drawn
const STEP = 12; // between two rows of marks
const ROWS = 3;
const NEAR = 12; // marks nearer than this go into different rows
const MARGIN = 7;

function shape(kind, attributes) {
  return svg("path", { d: SHAPES[kind] ?? SHAPES.grid, class: `mark ${kind}`, ...attributes });
}

/** One mark alone, for a legend. */
export function mark(kind, { superseded = false } = {}) {
  const faint = superseded ? " superseded" : "";
  return svg(
    "svg",
    { class: `key${faint}`, viewBox: "-7 -7 14 14", width: 14, height: 14, "aria-hidden": "true" },
    shape(kind),
  );
}

/** The row of each position: the lowest where it has room, else the one that is free first. */
function rows(xs) {
  const ends = Array(ROWS).fill(-Infinity);
  return xs.map((x) => {
    let row = ends.findIndex((end) => x - end >= NEAR);
    if (row < 0) row = ends.indexOf(Math.min(...ends));
    ends[row] = x;
    return row;
  });
}

function one({ position, kind, superseded }, x, row) {
  const y = BASE - 8 - row * STEP;
  return svg(
    "g",
    { class: superseded ? "superseded" : null },
    svg("title", {}, `${kind} at ${count(position)}${superseded ? ", superseded" : ""}`),
    svg("path", { class: "stem", d: `M${x} ${BASE}V${y}` }),
    shape(kind, { transform: `translate(${x} ${y})` }),
  );
}

/** The drawing of `entry`'s length, `width` pixels wide. */
export function drawLength(entry, width) {
  const inner = Math.max(1, width - 2 * MARGIN);
  const xs = entry.checkpoints.map(
    ({ position }) => +(MARGIN + (inner * position) / Math.max(1, entry.tokens)).toFixed(1),
  );
  const placed = rows(xs);
  const deepest = Math.max(MARGIN, ...xs);
  const points = entry.checkpoints.map(({ position, kind }) => `${kind} at ${count(position)}`);
  const label = `${count(entry.tokens)} tokens; checkpoints: ${points.join(", ") || "none"}`;
  return svg(
    "svg",
    { class: "length", width, height: HEIGHT, role: "img", "aria-label": label },
    svg("path", { class: "whole", d: `M${MARGIN} ${BASE}H${MARGIN + inner}` }),
    svg("path", { class: "resumable", d: `M${MARGIN} ${BASE}H${deepest}` }),
    ...entry.checkpoints.map((checkpoint, index) => one(checkpoint, xs[index], placed[index])),
  );
}
