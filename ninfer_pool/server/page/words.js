// The page's words and number formats.

const NUMBER = new Intl.NumberFormat("en");

export const count = (value) => NUMBER.format(value ?? 0);

export const plural = (value, one, many = `${one}s`) =>
  `${count(value)} ${value === 1 ? one : many}`;

export const share = (part, whole) => (whole > 0 ? part / whole : 0);

export function percent(fraction) {
  const value = 100 * fraction;
  return `${value > 99.95 || value === 0 ? value.toFixed(0) : value.toFixed(1)} %`;
}

export function bytes(value) {
  let size = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024)
      return `${unit === "B" || size >= 100 ? size.toFixed(0) : size.toFixed(1)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TiB`;
}

export function length(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400)
    return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} ms`;
  return value < 10000
    ? `${NUMBER.format(Math.round(value))} ms`
    : `${(value / 1000).toFixed(1)} s`;
}

export const clock = (epoch) => new Date(1000 * epoch).toLocaleTimeString("en-GB");

export const shortKey = (key) => key.slice(0, 8);

/** Kinds of checkpoint, and where each is taken. */
export const KINDS = {
  system: "the end of tools and system text: shared by every conversation that starts alike",
  history: "the end of the conversation so far, before the answer’s header",
  turn: "after the answer’s header, before the model thinks",
  response: "after the answer’s fixed opening, where its own words begin",
  junction: "where another prompt branched off, or where a request marked a breakpoint",
  grid: "at a fixed distance within a long prompt",
  frontier: "where the computed sequence ends: the next turn resumes here",
};

/** The way that a request took, in words. */
export function path(reuse) {
  if (!reuse) return "–";
  if (reuse === "full_reset") return "from the start";
  if (reuse === "append_frontier") return "at the frontier";
  const kind = /^restore_(.+)_checkpoint$/.exec(reuse);
  return kind ? `at a ${kind[1]} point` : reuse.replaceAll("_", " ");
}

/** Where a request resumed from, in words; nothing for the device. */
export const from = (tier) => (!tier || tier === "device" ? "" : `, from ${TIERS[tier] ?? tier}`);

const TIERS = { host: "host memory", disk: "disk" };

// reason: [in short, what it means, what helps]
const REASONS = {
  hit: [
    "resumed",
    "It was resumed as deep as anything retained agrees with it.",
    "Nothing needs to be done.",
  ],
  no_entry: [
    "new prompt",
    "Nothing retained begins like this prompt, so all of it was computed. That is how every " +
      "first request ends.",
    "If it was not the first: send the same system text and the same tools in the same order " +
      "each time, and the same salt.",
  ],
  diverged: [
    "diverges midway",
    "The prompt diverges from the retained ones. All up to the last checkpoint before there " +
      "was reused, the rest was computed.",
    "Keep what changes (a date, a random id, the order of tools) at the end of the prompt, " +
      "and send earlier answers back as they were.",
  ],
  no_checkpoint_before: [
    "no checkpoint near",
    "More tokens agree than could be reused: this kind of model resumes only where its whole " +
      "state was saved, and the nearest such place is far before the one where the prompts " +
      "diverge.",
    "A later prompt that parts at this place usually finds a checkpoint there. To have one " +
      "from the start, put the shared part into the system text, or mark its end with " +
      "cache_control.",
  ],
  evicted: [
    "had to make room",
    "More of it was retained once and is no longer: it had to make room for others, or its " +
      "time was over.",
    "Give the pool more memory (--kv-budget) or a tier below it (--host-budget, --disk-dir), " +
      "pin the entry, or send titles and other one-shots with retain_prefix: false.",
  ],
  opted_out: [
    "reuse turned off",
    "The request had allow_prefix_reuse: false or cache_prompt: false, or the server runs " +
      "with --no-prefix-reuse.",
    "Leave the switch away to resume.",
  ],
  below_minimum: [
    "too short",
    "What could have been resumed is shorter than the pool’s minimum.",
    "Nothing needs to be done: computing so few tokens is as quick.",
  ],
  no_room: [
    "no room",
    "There was no room for it next to running requests and pinned entries.",
    "Unpin entries, send fewer requests at once, or give the pool more memory (--kv-budget).",
  ],
  quarantined: [
    "failed a check",
    "What was retained for this prompt failed its check, so it was put aside and the prompt " +
      "was computed again. The answer is right.",
    "If it happens again, please report it with the server’s log.",
  ],
};

/** {short, means, helps} for a reason code. */
export function reason(code) {
  if (code?.startsWith("identity:")) {
    const field = code.slice("identity:".length).replaceAll("_", " ");
    return {
      short: `other ${field}`,
      means:
        `The same tokens are retained, but under another ${field}; they do not stand for the ` +
        `same thing.`,
      helps: `Send the same ${field} to resume.`,
    };
  }
  const [short, means, helps] = REASONS[code] ?? [(code ?? "–").replaceAll("_", " "), "", ""];
  return { short, means, helps };
}

const PARTS = { system: "the system text or the tools", generation_prompt: "the answer’s opening" };

/** The part of a request that `parted_in` names, in words. */
export function part(name) {
  const message = /^messages\[(\d+)\]$/.exec(name ?? "");
  return message ? `message ${Number(message[1]) + 1} (${name})` : (PARTS[name] ?? name);
}

const ENDS = {
  stop: "It ended by itself.",
  length: "It reached its limit of tokens.",
  cancelled: "It was cancelled.",
  error: "It ended with an error.",
};

/** How a request ended, in a sentence; empty where nothing is known. */
export const ending = (finish) => ENDS[finish] ?? "";
