// Requests to the server that the page came from, and its events.

let token = sessionStorage.getItem("token") ?? "";

export const unlocked = () => token !== "";
export function unlock(word) {
  token = word.trim();
  sessionStorage.setItem("token", token);
}

const headers = (more = {}) => (token ? { Authorization: `Bearer ${token}`, ...more } : more);

export class Refused extends Error {
  constructor(status, answer) {
    super(answer.error ?? (answer.mistakes ?? []).map(([place, text]) => `${place}: ${text}`).join("\n"));
    this.status = status;
    this.mistakes = answer.mistakes ?? [];
    this.code = answer.code ?? null;
  }
}

async function answer(response) {
  if (response.ok) return response.json(); // which fails where the request was given up before all of it came
  throw new Refused(response.status, await response.json().catch(() => ({ error: `The server answers ${response.status}.` })));
}

export const get = async (path) => answer(await fetch(path, { headers: headers() }));

export const post = async (path, body = {}, signal = undefined) => answer(await send(path, body, signal));

// Shows the code that a request would have executed, and asks; sends it again with what was permitted.
export async function postAsking(path, body, signal = undefined) {
  try {
    return await post(path, body, signal);
  } catch (error) {
    if (!error.code || !confirm(`This executes Python code with your rights:\n\n${Object.entries(error.code).map(([key, value]) => `${key} = ${value}`).join("\n")}\n\nExecute it?`)) throw error;
    return post(path, { ...body, code: error.code }, signal);
  }
}

export const send = (path, body, signal) => fetch(path, {
  method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal,
});

// Yields {id, event, data} of a stream of server-sent events.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const whole = text.split("\n\n");
    text = whole.pop();
    for (const block of whole) {
      const found = { id: null, event: "message", data: "" };
      for (const line of block.split("\n")) {
        const colon = line.indexOf(":");
        if (colon > 0) found[line.slice(0, colon)] = line.slice(colon + 1).replace(/^ /, "");
      }
      if (found.data) yield found;
    }
  }
}

// Follows the server's events until `signal` ends it; after an interruption it goes on where it was.
export async function follow(path, hear, signal, tell) {
  let last = null;
  let wait = 500;
  while (!signal.aborted) {
    try {
      const response = await fetch(path, { headers: headers(last === null ? {} : { "Last-Event-ID": last }), signal });
      if (!response.ok) await answer(response);
      tell("");
      for await (const event of events(response)) {
        wait = 500;
        hear(event.event, JSON.parse(event.data));
        last = event.id ?? last;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && error.status === 401) { tell("This page needs the token."); return; }
    }
    if (signal.aborted) return;
    tell("No connection; trying again.");
    await new Promise((go) => setTimeout(go, wait));
    wait = Math.min(wait * 2, 10000);
  }
}
