// One or two runs that answer side by side, with and without their adapters.

import { h, read, say } from "./dom.js";
import { events, get, post, send, unlocked } from "./server.js";

// As `workbench serve` takes them, in all of a conversation.
const MOST_PICTURES = 16;
const MOST_LETTERS = 7 * 2 ** 20;

export async function chatPage(wanted) {
  const picks = [0, 1].map((place) => h("select", { "aria-label": place ? "Second run" : "First run" }));
  const open = h("button", { type: "button", class: "main", disabled: !unlocked(), onclick: load }, "Load");
  const close = h("button", { type: "button", disabled: !unlocked(), onclick: () => post("/api/chat/close").then(show) }, "Free the memory");
  const state = h("p", { class: "soft", role: "status" });
  const bare = h("input", { type: "checkbox", onchange: build });
  const system = h("input", { placeholder: "optional", "aria-label": "System message" });
  const heat = h("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0", "aria-label": "Temperature" });
  const most = h("input", { type: "number", min: "1", step: "1", value: "128", "aria-label": "Most tokens" });
  const prompt = h("textarea", { "aria-label": "Message", placeholder: "Ask something; pictures can be dropped or pasted here. Ctrl+Enter sends it.", onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(); } });
  const file = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, onchange: () => { attach([...file.files]); file.value = ""; } });
  const choose = h("button", { type: "button", onclick: () => file.click() }, "Add a picture");
  const shown = h("div", { class: "row", role: "group", "aria-label": "Pictures of the message", "aria-live": "polite" });
  const field = h("div", {
    class: "field",
    ondragover: (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); },
    ondrop: (event) => { if (event.dataTransfer.files.length) { event.preventDefault(); attach([...event.dataTransfer.files]); } },
    onpaste: (event) => { if (event.clipboardData.files.length) { event.preventDefault(); attach([...event.clipboardData.files]); } },
  }, shown, prompt);
  const ask_ = h("button", { type: "button", class: "main", onclick: ask }, "Send");
  const halt = h("button", { type: "button", disabled: true, onclick: () => asked?.abort() }, "Stop");
  const talk = h("div", { class: "talk" });
  let found = { state: "closed", runs: [], models: [] };
  let columns = [];
  let pictures = [];
  let asked = null;
  let timer = 0;
  let known = null;
  const none = h("p", { hidden: true }, "No run of this folder writes text: a chat needs one that has ended and whose model answers, as those of recipes sft, prefer and reinforce. ", h("a", { href: "#/new?recipe=sft/quickstart" }, "Start one"), ".");

  function show(next) {
    const before = JSON.stringify(found.models);
    found = next;
    state.textContent = { closed: "No run is loaded.", loading: `Loads ${found.runs.join(" and ")} ...`, ready: `${found.runs.join(" and ")} ready.`, failed: found.error }[found.state];
    state.className = found.state === "failed" ? "bad" : "soft";
    close.disabled = !unlocked() || found.state === "closed";
    ask_.disabled = !unlocked() || found.state !== "ready";
    if (JSON.stringify(found.models) !== before) build();
    clearTimeout(timer);
    if (found.state === "loading") timer = setTimeout(() => get("/api/chat").then(show, (error) => say(error.message)), 700);
  }

  async function load() {
    const runs = [...new Set(picks.map((pick) => pick.value).filter(Boolean))];
    if (runs.length === 0) { say("Choose a run first."); return; }
    try { show(await post("/api/chat/open", { runs })); } catch (error) { say(error.message); }
  }

  async function attach(files) {
    for (const each of files) {
      if (!each.type.startsWith("image/")) { say(`${each.name} is no picture.`); continue; }
      const before = [...(columns[0]?.turns ?? []).flatMap((turn) => turn.pictures ?? []), ...pictures];
      if (before.length >= MOST_PICTURES) { say(`A conversation has at most ${MOST_PICTURES} pictures. Begin anew.`); return; }
      try {
        const picture = { name: each.name, url: await read(each) };
        const letters = [...before, picture].reduce((sum, one) => sum + one.url.length, 0);
        if (letters > MOST_LETTERS) { say(`${each.name}: the pictures of a conversation have at most 5 MB. Make it smaller, or begin anew.`); continue; }
        pictures.push(picture);
      } catch (error) { say(error.message); }
    }
    list();
  }

  function list() {
    shown.replaceChildren(...pictures.map((picture) => h("span", { class: "thumb" },
      h("img", { src: picture.url, alt: picture.name }),
      h("button", { type: "button", "aria-label": `Remove ${picture.name}`, onclick: () => { pictures = pictures.filter((each) => each !== picture); list(); choose.focus(); } }, "Remove"))));
  }

  // A column for each run, and for the backbone alone where the adapter is off.
  function build() {
    const backbones = found.models.filter((model) => !found.runs.includes(model));
    const shown = bare.checked ? [...found.runs, ...backbones] : found.runs;
    columns = (found.state === "ready" ? shown : []).map((model) => ({ model, turns: [], place: h("div", { class: "card", "aria-live": "polite" }, h("h3", {}, found.runs.includes(model) ? model : `${model}, without adapter`)) }));
    talk.replaceChildren(...columns.map((column) => column.place));
  }

  async function ask() {
    const text = prompt.value.trim();
    if (!text || found.state !== "ready" || asked) return;
    asked = new AbortController();
    ask_.disabled = true;
    halt.disabled = false;
    prompt.value = "";
    const sent = pictures;
    pictures = [];
    list();
    await Promise.all(columns.map((column) => answer(column, text, sent, asked.signal)));
    asked = null;
    ask_.disabled = false;
    halt.disabled = true;
    prompt.focus();
  }

  // A turn as OpenAI's interface has it.
  function message({ role, content, pictures: own = [] }) {
    if (!own.length) return { role, content };
    return { role, content: [...own.map((each) => ({ type: "image_url", image_url: { url: each.url } })), { type: "text", text: content }] };
  }

  async function answer(column, text, sent, signal) {
    column.turns.push({ role: "user", content: text, pictures: sent });
    const written = h("div", { class: "turn assistant" });
    column.place.append(h("div", { class: "turn user" }, sent.map((each) => h("img", { src: each.url, alt: each.name })), text), written);
    const began = performance.now();
    let tokens = 0;
    try {
      const messages = [...(system.value ? [{ role: "system", content: system.value }] : []), ...column.turns.map(message)];
      const response = await send("/api/chat/completions", { model: column.model, messages, temperature: Number(heat.value), max_tokens: Number(most.value) }, signal);
      if (!response.ok) throw new Error((await response.json()).error);
      for await (const event of events(response)) {
        if (event.data === "[DONE]") break;
        const piece = JSON.parse(event.data);
        if (piece.error) throw new Error(piece.error.message);
        written.textContent += piece.choices[0]?.delta?.content ?? "";
        tokens += 1;
      }
    } catch (error) { column.place.append(h("p", { class: "bad" }, signal.aborted ? "Stopped." : error.message)); }
    column.turns.push({ role: "assistant", content: written.textContent });
    const seconds = (performance.now() - began) / 1000;
    column.place.append(h("p", { class: "soft" }, `${seconds.toFixed(1)} s${tokens > 1 ? `, ${(tokens / seconds).toFixed(1)} pieces a second` : ""}`));
  }

  show(await get("/api/chat"));
  if (found.state === "ready") build();
  return {
    element: h("div", {}, h("h1", {}, "Chat"),
      h("div", { class: "row" }, picks, open, close), none, state,
      h("div", { class: "row" },
        h("label", {}, bare, " beside the backbone without adapter"),
        h("label", {}, "Temperature ", heat), h("label", {}, "Most tokens ", most), h("label", {}, "System ", system)),
      talk,
      field, h("div", { class: "row" }, ask_, halt, choose, file, h("button", { type: "button", onclick: build }, "Begin anew"))),
    title: "Chat",
    watch: "",
    hear(event, data) {
      if (event !== "runs") return;
      const names = data.filter((run) => run.adapter && run.writes).map((run) => run.name);
      if (names.join("\n") === known) return;
      known = names.join("\n");
      none.hidden = names.length > 0;
      picks.forEach((pick, place) => {
        const before = pick.value || (place ? found.runs[1] ?? "" : wanted ?? found.runs[0] ?? "");
        pick.replaceChildren(h("option", { value: "" }, place ? "no second run" : "choose a run"), ...names.map((name) => h("option", { value: name }, name)));
        pick.value = names.includes(before) ? before : "";
      });
    },
    close() { clearTimeout(timer); asked?.abort(); },
  };
}
