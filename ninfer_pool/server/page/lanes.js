// A strip per lane: its request, the parts of its prompt, its output.

import { attribute, byId, el, Keyed, show, text } from "./dom.js";
import { count, path, plural } from "./words.js";

const STATES = { idle: "idle", prefill: "reading", decode: "answering" };

/** How many tokens of a lane's prompt are reused, computed, and still to do. */
export function split(lane) {
  const prompt = lane.prompt_tokens ?? 0;
  const reused = Math.min(lane.cached_tokens ?? 0, prompt);
  const reached = lane.state === "decode" ? prompt : Math.min(lane.position ?? 0, prompt);
  const computed = Math.max(0, reached - reused);
  return { reused, computed, todo: prompt - reused - computed };
}

const segment = (name) => el("span", { class: name });

function make(key) {
  const state = el("span", { class: "state" });
  const what = el("span", { class: "what" });
  const made = el("span", { class: "made" });
  const parts = { reused: segment("reused"), computed: segment("computed"), todo: segment("todo") };
  const bar = el("div", { class: "bar", role: "img" }, ...Object.values(parts));
  const note = el("p", { class: "note" });
  const head = el("div", { class: "lane-head" }, el("b", {}, `Lane ${key}`), state, what, made);
  const node = el("li", { class: "lane" }, head, bar, note);
  const update = (lane) => {
    const busy = lane.state !== "idle" && lane.request !== null;
    attribute(node, "data-state", lane.state);
    text(state, STATES[lane.state] ?? lane.state);
    text(what, busy ? `request ${lane.request}` : "");
    text(
      made,
      busy && lane.state === "decode" ? `${plural(lane.output_tokens ?? 0, "token")} made` : "",
    );
    const sizes = busy ? split(lane) : { reused: 0, computed: 0, todo: 0 };
    for (const [name, part] of Object.entries(parts)) part.style.flexGrow = sizes[name];
    const todo = sizes.todo ? `, ${count(sizes.todo)} still to do` : "";
    const words = busy
      ? `${count(sizes.reused)} reused, ${count(sizes.computed)} computed${todo}`
      : "";
    attribute(bar, "aria-label", busy ? `Prompt: ${words}` : "No prompt");
    const way = lane.reuse ? (lane.cached_tokens ? `resumed ${path(lane.reuse)}: ` : "") : "";
    text(note, words && way + words);
    show(note, busy);
  };
  return { nodes: [node], update };
}

let lanes;

/** Draw every lane, and how many requests wait for one. */
export function drawLanes(pool) {
  lanes ??= new Keyed(byId("lanes"), make);
  lanes.update(pool.lanes, ({ lane }) => String(lane));
  const waiting = pool.queued ? `, ${count(pool.queued)} waiting` : "";
  text(
    byId("lanes-note"),
    `${count(pool.running)} of ${count(pool.lanes.length)} at work${waiting}`,
  );
}
