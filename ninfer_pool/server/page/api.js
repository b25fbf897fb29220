// Asks the server. Credentials are the browser's business: nothing is stored here but the salt.

const PATIENCE_MS = 8000;

let salt = "";

export const currentSalt = () => salt;

export function useSalt(value) {
  salt = value;
}

/** What the server said no with: `status`, and its words. Status 0: it did not answer. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The whole address of one of the server's paths, without what a person may have put before @. */
export const addressOf = (path) => new URL(path, location.origin + location.pathname);

function address(path) {
  const url = addressOf(path);
  if (salt) url.searchParams.set("cache_salt", salt);
  return url;
}

async function words(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? response.statusText;
  } catch {
    return response.statusText;
  }
}

async function ask(path, options = {}) {
  const patience = AbortSignal.timeout(PATIENCE_MS);
  let response;
  try {
    response = await fetch(address(path), { cache: "no-store", signal: patience, ...options });
  } catch {
    throw new Refusal(0, "no answer");
  }
  if (!response.ok) throw new Refusal(response.status, await words(response));
  try {
    return await response.json();
  } catch {
    throw new Refusal(0, "the answer broke off");
  }
}

const entry = (key) => `pool/entries/${encodeURIComponent(key)}`;

export const getPool = () => ask("pool");
export const getEntry = (key) => ask(entry(key));
export const removeEntry = (key) => ask(entry(key), { method: "DELETE" });
export const removeAll = () => ask("pool/entries", { method: "DELETE" });

export const pinEntry = (key, pinned) =>
  ask(`${entry(key)}/pin`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ pinned }),
  });
