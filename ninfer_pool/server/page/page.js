// Draws GET /pool once a second; less often when the page is hidden or the server is away.

import { addressOf, currentSalt, getPool, useSalt } from "./api.js";
import { drawRate } from "./chart.js";
import { attribute, byId, el, redraw, show, text } from "./dom.js";
import { connect, drawEntries, drawKinds } from "./entries.js";
import { drawLanes } from "./lanes.js";
import { drawRequests } from "./requests.js";
import { drawTiers } from "./tiers.js";
import * as words from "./words.js";

const EVERY_MS = 1000;
const HIDDEN_MS = 15000;
const LONGEST_MS = 30000;

let latest = null;
let failures = 0;
let timer = 0;
let due = 0;
let countdown = 0;
let looks = 0; // so that an answer to an older look is dropped
let seen = null; // the salt of the drawn entries

function setStatus(state, message) {
  attribute(byId("status"), "data-state", state);
  text(byId("status-text"), message);
}

function figures(pool) {
  const {
    requests,
    prompt_tokens: prompt,
    cached_tokens: cached,
    output_tokens: made,
  } = pool.totals;
  const { total, free } = pool.bytes;
  const { running, queued } = pool;
  const work = `${words.count(running)} running, ${words.count(queued)} waiting`;
  const used = words.percent(words.share(total - free, total));
  return [
    [
      "Prompt tokens reused",
      prompt ? words.percent(words.share(cached, prompt)) : "–",
      `${words.count(cached)} of ${words.count(prompt)}`,
    ],
    ["Requests", words.count(requests), running || queued ? work : "none running"],
    ["Tokens made", words.count(made), `up for ${words.length(pool.uptime_seconds)}`],
    ["Memory in use", used, `${words.bytes(free)} free of ${words.bytes(total)}`],
  ];
}

function drawFigures(pool) {
  const rows = figures(pool);
  redraw(byId("figures"), JSON.stringify(rows), () =>
    rows.map(([name, value, note]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value, " ", el("small", {}, note))),
    ),
  );
}

function drawWelcome(pool) {
  const salt = currentSalt();
  const fresh = pool.requests.length === 0 && pool.entries.length === 0;
  show(byId("welcome"), fresh);
  if (!fresh) return;
  text(
    byId("welcome-title"),
    salt ? "No requests under this salt yet" : "No requests yet",
  );
  const body = {
    model: pool.model,
    messages: [{ role: "user", content: "Say hello." }],
    max_tokens: 32,
    ...(salt ? { cache_salt: salt } : {}),
  };
  const fields = Object.entries(body).map(
    ([name, value]) => `    ${JSON.stringify(name)}: ${JSON.stringify(value)}`,
  );
  const json = `{\n${fields.join(",\n")}\n  }`.replaceAll("'", "'\\''");
  const url = addressOf("v1/chat/completions");
  text(byId("curl"), `curl ${url} \\\n  -H 'Content-Type: application/json' \\\n  -d '${json}'`);
  text(byId("openai-url"), addressOf("v1").href);
  text(byId("anthropic-url"), addressOf(".").href.replace(/\/$/, ""));
}

function drawSettings(pool) {
  const parts = [
    `policy ${pool.policy}`,
    `affinity ${pool.affinity}`,
    pool.single_lane ? "single lane: no pool" : null,
    pool.capacity?.text,
  ];
  text(byId("settings"), parts.filter(Boolean).join(" · "));
}

function draw(pool) {
  show(byId("main"), true);
  text(byId("model"), pool.model);
  drawFigures(pool);
  drawWelcome(pool);
  drawLanes(pool);
  drawRate(pool);
  drawTiers(pool);
  drawEntries(pool, currentSalt());
  drawRequests(pool.requests);
  drawSettings(pool);
}

const COMPLAINTS = {
  0: "The server does not answer.",
  401:
    "The server requires its API key. Load this page again and enter the key as the password " +
    "when the browser prompts for one.",
};

function complain(refusal) {
  const since =
    latest && seen === currentSalt() ? ` What you see is from ${words.clock(latest.now)}.` : "";
  const message = COMPLAINTS[refusal.status] ?? `The server’s error: ${refusal.message}.`;
  text(byId("banner"), message + since);
  show(byId("banner"), true);
  if (seen !== currentSalt()) show(byId("main"), false); // never another tenant's
  setStatus("away", refusal.status === 0 ? "away" : "refused");
}

function settle() {
  failures = 0;
  show(byId("banner"), false);
  show(byId("retry"), false);
  setStatus("live", "live");
}

/** Look now, and plan the next look. */
async function look() {
  clearTimeout(timer);
  const mine = ++looks;
  try {
    const pool = await getPool();
    if (mine !== looks) return;
    latest = pool;
    seen = currentSalt();
    settle();
    draw(pool);
  } catch (refusal) {
    if (mine !== looks) return;
    failures += 1;
    if (!("status" in refusal)) throw refusal;
    complain(refusal);
  } finally {
    if (mine === looks) plan();
  }
}

function plan() {
  const away = failures ? Math.min(LONGEST_MS, EVERY_MS * 2 ** failures) : EVERY_MS;
  const wait = document.hidden ? Math.max(away, HIDDEN_MS) : away;
  due = Date.now() + wait;
  timer = setTimeout(look, wait);
  showRetry();
}

/** Show the seconds until the next try. */
function showRetry() {
  clearTimeout(countdown);
  show(byId("retry"), failures > 0);
  if (!failures) return;
  const seconds = Math.max(0, Math.ceil((due - Date.now()) / 1000));
  text(byId("retry-text"), seconds ? `Next try in ${seconds} s.` : "Trying …");
  if (seconds) countdown = setTimeout(showRetry, 250);
}

/** Run a button's action, show its error if it fails, and look again. */
async function act(action) {
  show(byId("notice"), false);
  try {
    await action();
  } catch (refusal) {
    const why = refusal.status === 404 ? "it has grown or was evicted meanwhile" : refusal.message;
    text(byId("notice"), `That did not work: ${why}.`);
    show(byId("notice"), true);
  }
  await look();
}

/** Confirm with a dialog; Enter and Escape keep everything. */
function agree(title, message) {
  const dialog = byId("confirm");
  text(byId("confirm-title"), title);
  text(byId("confirm-text"), message);
  dialog.returnValue = "";
  dialog.showModal();
  byId("confirm-no").focus();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

function begin() {
  drawKinds();
  connect(act, agree);
  byId("confirm-no").addEventListener("click", () => byId("confirm").close("no"));
  byId("confirm-yes").addEventListener("click", () => byId("confirm").close("yes"));
  byId("retry-now").addEventListener("click", look);
  byId("salt-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useSalt(byId("salt").value);
    look();
  });
  byId("copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText(byId("curl").textContent);
    text(byId("copy"), "Copied");
    setTimeout(() => text(byId("copy"), "Copy"), 2000);
  });
  show(byId("copy"), Boolean(navigator.clipboard));
  document.addEventListener("visibilitychange", look);
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (latest && contentRect.width && width !== contentRect.width) draw(latest);
    width = contentRect.width;
  }).observe(byId("main"));
  look();
}

begin();
