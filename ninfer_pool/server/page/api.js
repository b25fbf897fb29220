// Requests to the server. The browser keeps the credentials; only the salt is stored here.

const PATIENCE_MS = 8000;

let salt = "";

export const currentSalt = () => salt;

export function useSalt(value) {
  salt = value;
}

/** An error answer: its status and message. Status 0: the server did not answer. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The whole address of one of the server's paths, without a name and password before @. */
export const addressOf = (path) => new URL(path, location.origin + location.pathname);

function address(path) {
  const url = addressOf(path);
  if (salt) url.searchParams.set("cache_salt", salt);
  return url;
}

async function messageOf(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? response.statusText;
  } catch {
    return response.statusText;
  }
}

async function send(path, options = {}) {
  const patience = AbortSignal.timeout(PATIENCE_MS);
  let response;
  try {
    response = await fetch(address(path), { cache: "no-store", signal: patience, ...options });
  } catch {
    throw new Refusal(0, "no answer");
  }
  if (!response.ok) throw new Refusal(response.status, await messageOf(response));
  try {
    return await response.json();
  } catch {
    throw new Refusal(0, "the answer broke off");
  }
}

const entry = (key) => `pool/entries/${encodeURIComponent(key)}`;

export const getPool = () => send("pool");
export const getEntry = (key) => send(entry(key));
export const removeEntry = (key) => send(entry(key), { method: "DELETE" });
export const removeAll = () => send("pool/entries", { method: "DELETE" });

export const pinEntry = (key, pinned) =>
  send(`${entry(key)}/pin`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ pinned }),
  });
