// The share of prompt tokens reused per request: in a moving window and since the start.
// uPlot draws; its file is next to this one.

import { attribute, byId, el, show, text } from "./dom.js";
import { clock, count, percent, plural, share } from "./words.js";

/* global uPlot */

const WINDOW = 20;
const HEIGHT = 210;
const FONT = "12px system-ui, sans-serif";

let chart = null;
let points = []; // one per request: {epoch, prompt, cached, moving, overall}
let drawn = null;

/** One point per request. `totals` include requests before the history's first. */
export function series(history, totals) {
  const sum = (rows, column) => rows.reduce((total, row) => total + row[column], 0);
  let prompt = Math.max(0, (totals.prompt_tokens ?? 0) - sum(history, 1));
  let cached = Math.max(0, (totals.cached_tokens ?? 0) - sum(history, 2));
  return history.map(([epoch, tokens, reused], index) => {
    const rows = history.slice(Math.max(0, index + 1 - WINDOW), index + 1);
    prompt += tokens;
    cached += reused;
    return {
      epoch,
      prompt: tokens,
      cached: reused,
      moving: share(sum(rows, 2), sum(rows, 1)),
      overall: share(cached, prompt),
    };
  });
}

/** A colour of the page's style sheet, read whenever something is drawn. */
const colour = (name) => () =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

/** A legend's value: at the pointer, else of the last request. */
const atPointer = (field) => (_, __, ___, index) =>
  percent((points[index] ?? points.at(-1))?.[field] ?? 0);

function facts(_, __, ___, index) {
  const point = points[index];
  if (!point) return "";
  return `${clock(point.epoch)}: ${count(point.cached)} of ${count(point.prompt)}`;
}

const axis = (options) => ({
  stroke: colour("muted"),
  font: FONT,
  ticks: { show: false },
  grid: { stroke: colour("line"), width: 1 },
  ...options,
});

function options(width) {
  const last = (u) => [u.data[0].length - 1];
  return {
    width,
    height: HEIGHT,
    scales: { x: { time: false }, y: { range: [0, 1] } },
    axes: [
      axis({
        space: 90,
        size: 28,
        incrs: [1, 2, 5, 10, 20, 50, 100, 200],
        values: (_, indices) => indices.map((index) => clock(points[index]?.epoch ?? 0)),
        grid: { show: false },
      }),
      axis({
        size: 52,
        values: (_, shares) => shares.map((each) => `${Math.round(100 * each)} %`),
      }),
    ],
    series: [
      { label: "", value: () => "" },
      {
        label: "each request",
        stroke: colour("faint"),
        paths: () => null,
        points: { show: true, size: 5, fill: colour("faint") },
        value: facts,
      },
      {
        label: "since the start",
        stroke: colour("ink"),
        dash: [5, 4],
        points: { show: false },
        value: atPointer("overall"),
      },
      {
        label: `last ${WINDOW} requests`,
        stroke: colour("accent"),
        width: 2,
        points: { show: true, filter: last, size: 8, fill: colour("accent") },
        value: atPointer("moving"),
      },
    ],
    cursor: { y: false, drag: { x: false } },
    legend: { mount: (_, table) => byId("rate-legend").replaceChildren(table) },
  };
}

function forget() {
  chart?.destroy();
  chart = drawn = null;
}

/** Draw the chart into its section. */
export function drawRate(pool) {
  const box = byId("rate");
  points = series(pool.history ?? [], pool.totals ?? {});
  const last = points.at(-1);
  const width = Math.max(240, box.clientWidth);
  const signature = JSON.stringify([points.length, last, width]);
  if (drawn === signature) return;
  text(byId("rate-note"), last ? `${plural(points.length, "request")} drawn` : "");
  show(byId("rate-legend"), Boolean(last));
  if (!last) {
    forget();
    box.replaceChildren(
      el("p", { class: "empty" }, "The line begins with the first request that ends."),
    );
  } else {
    if (!chart) box.replaceChildren();
    chart ??= new uPlot(options(width), [[], [], [], []], box);
    if (chart.width !== width) chart.setSize({ width, height: HEIGHT });
    chart.setData([
      points.map((_, index) => index),
      points.map(({ cached, prompt }) => share(cached, prompt)),
      points.map(({ overall }) => overall),
      points.map(({ moving }) => moving),
    ]);
    describe(last);
  }
  drawn = signature;
}

function describe(last) {
  const drawing = chart.root.querySelector(".u-wrap");
  attribute(drawing, "role", "img");
  attribute(
    drawing,
    "aria-label",
    `Share of prompt tokens reused over ${plural(points.length, "request")}: ` +
      `${percent(last.moving)} in the last ${WINDOW}, ${percent(last.overall)} since the start`,
  );
}

// Colours of the legend are read once: another colour scheme needs another chart.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forget);
