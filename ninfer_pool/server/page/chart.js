// The share of prompt tokens reused, request by request: a moving window and since the start.

import { attribute, byId, el, redraw, show, svg, text } from "./dom.js";
import { clock, count, percent, plural, share } from "./words.js";

const WINDOW = 20;
const HEIGHT = 210;
const LEFT = 44;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 24;

/**
 * One point a request: {epoch, prompt, cached, moving, overall}. `totals` tell what came before
 * the history, so that the overall line ends at the overall rate.
 */
export function series(history, totals) {
  const sum = (rows, column) => rows.reduce((total, row) => total + row[column], 0);
  let prompt = Math.max(0, (totals.prompt_tokens ?? 0) - sum(history, 1));
  let cached = Math.max(0, (totals.cached_tokens ?? 0) - sum(history, 2));
  return history.map(([epoch, asked, reused], index) => {
    const rows = history.slice(Math.max(0, index + 1 - WINDOW), index + 1);
    prompt += asked;
    cached += reused;
    return {
      epoch,
      prompt: asked,
      cached: reused,
      moving: share(sum(rows, 2), sum(rows, 1)),
      overall: share(cached, prompt),
    };
  });
}

const y = (fraction) => +(TOP + (1 - fraction) * (HEIGHT - TOP - BOTTOM)).toFixed(1);

function line(points, xs, field, name) {
  const d = points.map((point, index) => `${index ? "L" : "M"}${xs[index]} ${y(point[field])}`);
  return svg("path", { class: name, d: d.join("") });
}

function axes(points, width) {
  const marks = [0, 0.25, 0.5, 0.75, 1].map((fraction) =>
    svg("path", { class: "gridline", d: `M${LEFT} ${y(fraction)}H${width - RIGHT}` }),
  );
  const labels = [0, 0.5, 1].map((fraction) =>
    svg("text", { x: LEFT - 8, y: y(fraction) + 4, "text-anchor": "end" }, `${100 * fraction} %`),
  );
  const ends = [
    svg("text", { x: LEFT, y: HEIGHT - 6 }, clock(points[0].epoch)),
    svg(
      "text",
      { x: width - RIGHT, y: HEIGHT - 6, "text-anchor": "end" },
      clock(points.at(-1).epoch),
    ),
  ];
  return [...marks, ...labels, ...(points.length > 1 ? ends : ends.slice(1))];
}

function drawing(points, width) {
  const inner = width - LEFT - RIGHT;
  const step = inner / Math.max(1, points.length - 1);
  const xs = points.map(
    (_, index) => +(points.length > 1 ? LEFT + index * step : LEFT + inner).toFixed(1),
  );
  const dots = points.map((point, index) =>
    svg("circle", {
      class: "request",
      cx: xs[index],
      cy: y(share(point.cached, point.prompt)),
      r: 2,
    }),
  );
  const last = points.at(-1);
  const label =
    `Share of prompt tokens reused over ${plural(points.length, "request")}: ` +
    `${percent(last.moving)} in the last ${WINDOW}, ${percent(last.overall)} since the start`;
  const cursor = svg("path", { class: "cursor", d: "" });
  const node = svg(
    "svg",
    { width, height: HEIGHT, role: "img", "aria-label": label },
    ...axes(points, width),
    cursor,
    ...dots,
    line(points, xs, "overall", "overall"),
    line(points, xs, "moving", "moving"),
    svg("circle", { class: "end", cx: xs.at(-1), cy: y(last.moving), r: 4 }),
  );
  follow(node, cursor, points, xs);
  return node;
}

/** Tell in words what the pointer is nearest to. */
function follow(node, cursor, points, xs) {
  const readout = byId("rate-readout");
  node.addEventListener("pointermove", (event) => {
    const at = event.clientX - node.getBoundingClientRect().left;
    const distances = xs.map((x) => Math.abs(x - at));
    const index = distances.indexOf(Math.min(...distances));
    const { epoch, prompt, cached, moving } = points[index];
    attribute(cursor, "d", `M${xs[index]} ${TOP}V${HEIGHT - BOTTOM}`);
    text(
      readout,
      `${clock(epoch)}: ${count(cached)} of ${count(prompt)} tokens reused ` +
        `(${percent(share(cached, prompt))}); window ${percent(moving)}`,
    );
  });
  node.addEventListener("pointerleave", () => {
    attribute(cursor, "d", "");
    text(readout, "");
  });
}

function legend(last) {
  return [
    ["moving", `last ${WINDOW} requests`, last.moving],
    ["overall", "since the start", last.overall],
  ]
    .map(([name, words, value]) =>
      el("li", {}, el("span", { class: `stroke ${name}` }), words, el("b", {}, percent(value))),
    )
    .concat([el("li", {}, el("span", { class: "spot" }), "each request")]);
}

/** Draw the chart into its section. */
export function drawRate(pool) {
  const box = byId("rate");
  const points = series(pool.history ?? [], pool.totals ?? {});
  const width = Math.max(240, box.clientWidth);
  text(byId("rate-note"), points.length ? `${plural(points.length, "request")} drawn` : "");
  show(byId("rate-legend"), points.length > 0);
  const signature = JSON.stringify([points.length, points.at(-1), width]);
  if (box.drawn === signature) return;
  text(byId("rate-readout"), "");
  redraw(box, signature, () => [
    points.length
      ? drawing(points, width)
      : el("p", { class: "empty" }, "The line begins with the first request that ends."),
  ]);
  if (points.length) byId("rate-legend").replaceChildren(...legend(points.at(-1)));
}
