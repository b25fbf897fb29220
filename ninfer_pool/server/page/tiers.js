// The device and the tiers below it: how full each is, and what went through it.

import { byId, el, redraw, show } from "./dom.js";
import * as words from "./words.js";

const NAMES = { device: "Device", host: "Host memory", disk: "Disk" };

/** The note next to a tier's bar; empty under a salt, where its counts are not sent. */
function note(tier) {
  if (tier.entries === null) return "";
  const { entries, promoted, dropped, failed, damaged } = tier;
  const parts = [words.plural(entries, "entry", "entries")];
  if (promoted) parts.push(`${words.plural(promoted, "checkpoint")} brought back`);
  if (dropped) parts.push(`${words.count(dropped)} not taken in`);
  if (failed) parts.push(`${words.plural(failed, "failure")}`);
  if (damaged) parts.push(`${words.count(damaged)} found damaged`);
  return parts.join(" · ");
}

function row(tier) {
  const name = NAMES[tier.tier] ?? tier.tier;
  const size = `${words.bytes(tier.bytes)} of ${words.bytes(tier.budget_bytes)}`;
  const used = el("span", { class: "kv" });
  const free = el("span", { class: "free" });
  used.style.flexGrow = tier.bytes;
  free.style.flexGrow = Math.max(0, tier.budget_bytes - tier.bytes);
  const label = { role: "img", "aria-label": `${name}: ${size}` };
  const bar = el("div", { class: "bar", ...label }, used, free);
  return el(
    "li",
    { class: "tier", "data-tier": tier.tier },
    el("b", {}, name),
    bar,
    el("span", { class: "size" }, size),
    el("span", { class: "note" }, note(tier)),
  );
}

/** Draw a bar for each tier, the device first; nothing where there is the device alone. */
export function drawTiers(pool) {
  const below = pool.tiers ?? [];
  show(byId("tiers"), below.length > 0);
  if (!below.length) return;
  const device = { tier: "device", bytes: pool.bytes.total - pool.bytes.free, entries: null };
  const every = [{ ...device, budget_bytes: pool.bytes.total }, ...below];
  redraw(byId("tiers"), JSON.stringify(every), () => every.map(row));
}
