// Retained entries: bytes by use, and a row per entry with its checkpoints and explanation.

import { getEntry, pinEntry, removeAll, removeEntry } from "./api.js";
import { attribute, byId, el, Keyed, redraw, show, text } from "./dom.js";
import { drawLength, mark } from "./marks.js";
import * as words from "./words.js";

const SHOWN = 100; // rows drawn before “Show all”
const LEAST = 4; // pixels of the memory's bar that a segment of its own has
const WIDTH = 1000; // of that bar where it is not laid out yet

let act = async () => {}; // runs a button's action, then updates the page; set by `connect`
let confirm = async () => false;
let all = false;
let largest = 1;

/** Wire the section's buttons: `run(action)` and `agree(title, text)` come from the page. */
export function connect(run, agree) {
  act = run;
  confirm = agree;
  byId("remove-all").addEventListener("click", async () => {
    const count = Number(byId("remove-all").dataset.count);
    const title = `Remove ${words.plural(count, "entry", "entries")}?`;
    const what =
      "Every entry listed here is removed unless pinned or in use; " +
      "later prompts are computed again.";
    if (await confirm(title, what)) await act(removeAll);
  });
  byId("show-all").addEventListener("click", () => {
    all = true;
    act(async () => {});
  });
}

function bar(entry) {
  const kv = el("span", { class: "kv" });
  const image = el("span", { class: "image" });
  kv.style.flexGrow = entry.kv_bytes;
  image.style.flexGrow = entry.image_bytes;
  const node = el("span", { class: "weight" }, kv, image);
  node.style.width = `${100 * words.share(entry.bytes, largest)}%`;
  return node;
}

function chips(entry) {
  return entry.checkpoints.map(({ position, kind, superseded }) =>
    el(
      "li",
      { class: superseded ? "superseded" : null },
      mark(kind, { superseded }),
      `${kind} `,
      el("b", {}, words.count(position)),
      superseded ? " superseded" : "",
    ),
  );
}

function made(request) {
  const { short } = words.reason(request.reason);
  return el(
    "li",
    {},
    `Request ${request.request}: ${words.count(request.cached_tokens)} of ` +
      `${words.count(request.prompt_tokens)} reused, ${words.path(request.reuse)} (${short})`,
  );
}

function makeDetail(key, id) {
  const explained = el("ul", { class: "explanation" });
  const points = el("ul", { class: "legend points" });
  const requests = el("ul", { class: "uses" });
  const usesTitle = el("h4", {}, "Requests that ended here");
  const pin = el("button", { type: "button", class: "pin" }, "Pin");
  const remove = el("button", { type: "button", class: "danger remove" }, "Remove");
  const facts = el("p", { class: "note codes" });
  const buttons = el("div", { class: "buttons" }, pin, remove);
  const node = el(
    "div",
    { class: "detail", id },
    explained,
    el("h4", {}, "Checkpoints"),
    points,
    usesTitle,
    requests,
    facts,
    buttons,
  );
  node.hidden = true;
  let entry = null;
  pin.addEventListener("click", () => act(() => pinEntry(key, !entry.pinned)));
  remove.addEventListener("click", async () => {
    const sizes = `${words.count(entry.tokens)} tokens, ${words.bytes(entry.bytes)}`;
    const pinned = entry.pinned ? " It is pinned: unpin it first." : "";
    const agreed = await confirm(
      `Remove entry ${words.shortKey(key)}?`,
      `${sizes}.${pinned} Its conversation is computed again when it continues.`,
    );
    if (agreed) await act(() => removeEntry(key));
  });
  return {
    node,
    update(latest) {
      entry = latest;
      text(
        facts,
        below(entry) ? `key ${key}` : `key ${key} · made ${words.length(entry.age_seconds)} ago`,
      );
      text(pin, entry.pinned ? "Unpin" : "Pin");
      redraw(points, JSON.stringify(entry.checkpoints), () => chips(entry));
    },
    explain({ explanation, requests: uses }) {
      redraw(explained, JSON.stringify(explanation), () =>
        explanation.map((line) => el("li", {}, line)),
      );
      redraw(requests, JSON.stringify(uses), () => uses.map(made));
      show(usesTitle, uses.length > 0);
    },
    fail(message) {
      redraw(explained, message, () => [el("li", {}, message)]);
    },
  };
}

async function explain(key, detail) {
  try {
    detail.explain(await getEntry(key));
  } catch (refusal) {
    if (refusal.status === 404) detail.fail("It has just grown or was evicted.");
    else detail.fail(`Its explanation is missing (${refusal.message}).`);
  }
}

const badge = (flag) => el("span", { class: `badge ${flag}` }, flag);

/** Whether an entry is stored only in a tier below the device; its age is then unknown. */
const below = (entry) => (entry.tier ?? "device") !== "device";

function facts(entry) {
  const parts = below(entry)
    ? [`in the ${entry.tier} tier`]
    : [`lane ${entry.lane}`, `used ${words.length(entry.idle_seconds)} ago`];
  if (entry.priority) parts.push(`priority ${entry.priority}`);
  return parts.join(" · ");
}

function make(key) {
  const id = `entry-${key}`;
  const open = { "aria-expanded": "false", "aria-controls": id };
  const name = el("button", { type: "button", class: "key-name", ...open }, words.shortKey(key));
  const badges = el("span", { class: "badges" });
  const note = el("p", { class: "note" });
  const drawing = el("div", { class: "drawing" });
  const weight = el("div", { class: "weights" });
  const size = el("p", { class: "size" });
  const tokens = el("p", { class: "size" });
  const who = el("div", { class: "who" }, el("h3", {}, name, badges), note);
  const extent = el("div", { class: "extent" }, drawing, tokens);
  const sizes = el("div", { class: "sizes" }, weight, size);
  const head = el("div", { class: "entry-head" }, who, extent, sizes);
  const detail = makeDetail(key, id);
  const node = el("li", { class: "entry", "data-key": key }, head, detail.node);
  head.addEventListener("click", () => {
    detail.node.hidden = !detail.node.hidden;
    attribute(name, "aria-expanded", String(!detail.node.hidden));
    if (!detail.node.hidden) explain(key, detail);
  });
  const update = (entry) => {
    const flags = [
      below(entry) ? entry.tier : "",
      entry.pinned ? "pinned" : "",
      entry.released ? "released" : "",
    ].filter(Boolean);
    redraw(badges, flags.join(), () => flags.map(badge));
    text(note, facts(entry));
    text(tokens, `${words.plural(entry.tokens, "token")} · ${words.plural(entry.hits, "hit")}`);
    text(size, `${words.bytes(entry.kv_bytes)} KV + ${words.bytes(entry.image_bytes)} states`);
    redraw(weight, JSON.stringify([entry.kv_bytes, entry.image_bytes, largest]), () => [
      bar(entry),
    ]);
    const width = drawing.clientWidth || 300;
    const signature = JSON.stringify([entry.tokens, entry.checkpoints, width]);
    redraw(drawing, signature, () => [drawLength(entry, width)]);
    detail.update(entry);
    if (!detail.node.hidden) explain(key, detail);
  };
  return { nodes: [node], update };
}

const onDevice = (pool) => pool.entries.filter((entry) => !below(entry));

/** Bytes by use: [class, words, bytes, title]; entries are this tenant's alone. */
export function uses(pool) {
  const sum = (field) => onDevice(pool).reduce((total, entry) => total + entry[field], 0);
  const { total, free, running } = pool.bytes;
  const kv = sum("kv_bytes");
  const image = sum("image_bytes");
  const others = Math.max(0, total - free - running - kv - image);
  return [
    ["kv", "KV", kv, "keys and values of the entries below"],
    ["image", "states", image, "the model’s state at each checkpoint below"],
    [
      "others",
      "shared or other tenants’",
      others,
      "held by several entries, or under another salt",
    ],
    ["running", "running", running, "held by requests at work"],
    ["free", "free", free, "unused"],
  ];
}

function drawMemory(pool) {
  const rows = uses(pool);
  const { total, pinned } = pool.bytes;
  const listed = rows.map(([, name, size]) => `${name} ${words.bytes(size)}`).join(", ");
  attribute(byId("memory"), "aria-label", `${words.bytes(total)} in all: ${listed}`);
  const held = onDevice(pool).map((entry) => [entry.key, entry.bytes, entry.pinned]);
  const width = byId("memory").clientWidth || WIDTH;
  const signature = JSON.stringify([rows, pinned, held]);
  redraw(byId("memory"), `${width} ${signature}`, () => segments(pool, rows, total / width));
  const last = ["pinned", "of it pinned", pinned, "of every tenant; never evicted for room"];
  redraw(byId("memory-legend"), signature, () => [...rows, last].map(legend));
}

const legend = ([name, label, size, title]) =>
  el(
    "li",
    { title },
    el("span", { class: `swatch ${name}` }),
    label,
    el("b", {}, words.bytes(size)),
  );

/**
 * Each entry's KV and states side by side, then other tenants' bytes, and free ones. Entries
 * narrower than a few pixels, of `pixel` bytes each, share one segment.
 */
function segments(pool, rows, pixel) {
  const part = (name, size, title) => {
    const node = el("span", { class: name, title });
    node.style.flexGrow = size;
    return node;
  };
  const group = (entries, pinned) => {
    const sum = (field) => entries.reduce((all, entry) => all + entry[field], 0);
    const many = words.plural(entries.length, "small entry", "small entries");
    const name = entries.length > 1 ? many : words.shortKey(entries[0].key);
    const title = `${name}: ${words.bytes(sum("bytes"))}`;
    const [kv, image] = [sum("kv_bytes"), sum("image_bytes")];
    const node = part(pinned ? "group pinned" : "group", kv + image, title);
    node.append(part("kv", kv, title), part("image", image, title));
    return node;
  };
  const nodes = [true, false].flatMap((pinned) => {
    const entries = onDevice(pool).filter((entry) => entry.pinned === pinned);
    const small = entries.filter(({ bytes }) => bytes < LEAST * pixel);
    const rest = entries.filter(({ bytes }) => bytes >= LEAST * pixel);
    const groups = rest.map((entry) => group([entry], pinned));
    return small.length ? [...groups, group(small, pinned)] : groups;
  });
  const rest = rows
    .slice(2)
    .filter(([, , size]) => size > 0)
    .map(([name, label, size]) => part(name, size, `${label}: ${words.bytes(size)}`));
  return [...nodes, ...rest];
}

const EMPTY = "Nothing is retained. A request leaves an entry unless it has retain_prefix: false.";
const EMPTY_UNDER_SALT =
  "Nothing is retained under this salt. Send a request with this cache_salt, or look without one.";

function note(pool, salt) {
  const entries = words.plural(pool.entries.length, "entry", "entries");
  const limit = pool.max_entries ? ` (at most ${words.count(pool.max_entries)})` : "";
  return `${entries}${limit}${salt ? " under this salt" : ""}, newest first`;
}

let list;

/** Draw every entry retained under the present salt. */
export function drawEntries(pool, salt) {
  list ??= new Keyed(byId("entry-list"), make);
  const entries = [
    ...onDevice(pool).sort((a, b) => a.age_seconds - b.age_seconds || (a.key < b.key ? -1 : 1)),
    ...pool.entries.filter(below),
  ];
  const drawn = all ? entries : entries.slice(0, SHOWN);
  largest = Math.max(1, ...entries.map(({ bytes }) => bytes));
  drawMemory(pool);
  list.update(drawn, ({ key }) => key);
  text(byId("entries-note"), note(pool, salt));
  text(byId("entries-empty"), salt ? EMPTY_UNDER_SALT : EMPTY);
  show(byId("entries-empty"), entries.length === 0);
  show(byId("remove-all"), entries.length > 1);
  byId("remove-all").dataset.count = entries.length;
  show(byId("entries-more"), entries.length > drawn.length);
  text(byId("show-all"), `Show all ${words.count(entries.length)}`);
  show(byId("marks"), entries.length > 0);
}

/** The legend of the marks, once. */
export function drawKinds() {
  const kinds = Object.entries(words.KINDS).map(([kind, meaning]) =>
    el("li", {}, mark(kind), el("b", {}, kind), ` ${meaning}`),
  );
  const meaning = " superseded: a newer checkpoint made it useless; evicted first";
  const faint = mark("turn", { superseded: true });
  byId("kinds").replaceChildren(...kinds, el("li", {}, faint, el("b", {}, "faint"), meaning));
}
