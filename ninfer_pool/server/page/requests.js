// The last requests: how much each reused, on which way, and why not more.

import { attribute, byId, el, Keyed, redraw, show, text } from "./dom.js";
import * as words from "./words.js";

const FEW = 20; // rows drawn before “Show older”

const cell = (name, ...children) => el("td", { class: name }, ...children);

function sentences(request) {
  const { means, helps } = words.reason(request.reason);
  const parted =
    request.parted_at === null || request.parted_at === undefined
      ? ""
      : `The prompt diverges at token ${words.count(request.parted_at)}` +
        `${request.parted_in ? `, in ${words.part(request.parted_in)}` : ""}.`;
  const computed = request.prompt_tokens - request.cached_tokens;
  const exact = request.exact
    ? "Its answer is bit for bit what it would be without reuse."
    : "It was resumed at a point reached by other cuts: rounding may differ from a run " +
      "without reuse.";
  const taken = request.cached_tokens
    ? `${words.plural(request.cached_tokens, "prompt token")} reused, resumed ` +
      `${words.path(request.reuse)}${words.from(request.tier)}, ` +
      `and ${words.count(computed)} computed. ${exact}`
    : `All ${words.plural(computed, "prompt token")} computed.`;
  return [
    [means, parted].filter(Boolean).join(" "),
    helps && request.reason !== "hit" ? `What helps: ${helps}` : "",
    taken,
    `${request.endpoint}, arrived at ${words.clock(request.arrived)}, waited ` +
      `${words.milliseconds(request.queue_ms)} for a lane, first token after ` +
      `${words.milliseconds(request.ttft_ms)}, ` +
      `${words.plural(request.output_tokens, "token")} made, all done after ` +
      `${words.milliseconds(request.total_ms)}. ${words.ending(request.finish)}`,
  ].filter(Boolean);
}

function makeFacts(id) {
  const lines = el("div", { class: "lines" });
  const codes = el("p", { class: "note codes" });
  const row = el("tr", { class: "facts", id }, el("td", { colspan: 9 }, lines, codes));
  row.hidden = true;
  const update = (request) => {
    const texts = sentences(request);
    redraw(lines, texts.join("\n"), () => texts.map((line) => el("p", {}, line)));
    const codesText = [request.reuse, request.reason, request.finish].filter(Boolean).join(" · ");
    text(codes, codesText + (request.lane === null ? "" : ` · lane ${request.lane}`));
  };
  return { row, update };
}

function makeReused() {
  const fill = el("span", { class: "fill" });
  const figure = el("b");
  const rate = el("span", { class: "note" });
  const bar = el("span", { class: "meter", "aria-hidden": "true" }, fill);
  const node = cell("reused-cell", el("span", { class: "reused-line" }, bar, figure, rate));
  const update = ({ cached_tokens: cached, prompt_tokens: prompt }) => {
    const part = words.share(cached, prompt);
    fill.style.width = `${100 * part}%`;
    text(figure, words.count(cached));
    text(rate, words.percent(part));
  };
  return { node, update };
}

function make(key) {
  const id = `request-${key}`;
  const facts = makeFacts(id);
  const reused = makeReused();
  const why = el("button", {
    type: "button",
    class: "why",
    "aria-expanded": "false",
    "aria-controls": id,
  });
  why.addEventListener("click", () => {
    facts.row.hidden = !facts.row.hidden;
    attribute(why, "aria-expanded", String(!facts.row.hidden));
  });
  const cells = {
    when: cell("wide"),
    prompt: cell("number"),
    path: cell("wide"),
    made: cell("number wide"),
    first: cell("number wide"),
    total: cell("number wide"),
  };
  const number = el("th", { scope: "row", class: "number" }, key);
  const { when, prompt, path, made, first, total } = cells;
  const reason = cell("", why);
  const row = el("tr", {}, number, when, prompt, reused.node, path, reason, made, first, total);
  const update = (request) => {
    const { short, means } = words.reason(request.reason);
    text(when, words.clock(request.arrived));
    text(prompt, words.count(request.prompt_tokens));
    reused.update(request);
    text(path, words.path(request.reuse) + words.from(request.tier));
    text(why, short);
    attribute(why, "title", means || null);
    attribute(row, "data-reason", request.reason);
    text(made, words.count(request.output_tokens));
    text(first, words.milliseconds(request.ttft_ms));
    text(total, words.milliseconds(request.total_ms));
    facts.update(request);
  };
  return { nodes: [row, facts.row], update };
}

let rows;
let shown = FEW;

/** Draw the table of the last requests, newest first. */
export function drawRequests(requests) {
  rows ??= new Keyed(byId("request-rows"), make);
  byId("older").onclick = () => {
    shown = Infinity;
    drawRequests(requests);
  };
  show(byId("requests-more"), requests.length > shown);
  rows.update(requests.slice(0, shown), ({ request }) => String(request));
  show(byId("requests"), requests.length > 0);
  show(byId("requests-empty"), requests.length === 0);
}
