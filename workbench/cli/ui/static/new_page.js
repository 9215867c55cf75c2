// The form that starts a run: settings of a recipe, what is wrong with them, what the model will see, what it takes.

import { h, read, say, table } from "./dom.js";
import { get, post, postAsking, unlocked } from "./server.js";

const LATER_MS = 600;
const MOST_BYTES = 5 * 2 ** 20; // of a file, a third more in base64

export async function newPage(wanted) {
  const [names, settings, placeOfRuns] = await Promise.all([get("/api/recipes"), get("/api/settings"), get("/api/about")]);
  const start = names.includes(wanted) ? wanted : "sft/quickstart";
  const answers = new Map();
  let recipe = null;
  let mistakes = [];
  let looking = null;
  let timer = 0;

  const groups = new Map();
  for (const name of names) {
    const group = /\.ya?ml$/.test(name) ? "this folder" : name.split("/")[0];
    groups.set(group, [...(groups.get(group) ?? []), h("option", { value: name }, name)]);
  }
  const choice = h("select", { id: "recipe", onchange: (event) => load(event.target.value) },
    [...groups].map(([label, options]) => h("optgroup", { label }, options)));
  const about = h("details", {}, h("summary", {}, "The recipe"), h("pre", { class: "card", tabindex: "0" }));
  const run = h("input", { id: "run-name", oninput: command });
  const search = h("input", { type: "search", id: "search", placeholder: "rank, packing, freeze", oninput: () => build() });
  const fields = h("div");
  const general = h("div", { class: "bad", role: "alert" });
  const line = h("pre", { class: "card command", tabindex: "0", "aria-label": "Command" });
  const file = h("input", { type: "file", hidden: true, onchange: () => { if (file.files.length) drop(file.files[0]); file.value = ""; } });
  const live = h("input", { type: "checkbox", id: "live", checked: true });
  const outcome = h("div", { "aria-live": "polite" });
  const buttons = ["Check", "Plan", "Start"].map((name) => h("button", { type: "button", class: name === "Start" ? "main" : null, disabled: !unlocked(), onclick: { Check: () => look("check"), Plan: () => look("plan"), Start: begin }[name] }, name));

  const written = (key) => recipe?.written[key];
  const current = (key, fallback) => answers.get(key) ?? written(key) ?? fallback;

  // Whether a setting belongs to the method, policy or the like that is chosen.
  function applies(setting) {
    if (setting.of.length === 0) return true;
    const section = setting.key.slice(0, setting.key.lastIndexOf("."));
    const chooser = settings.find((each) => Object.keys(each.choices).length && each.key.slice(0, each.key.lastIndexOf(".")) === section);
    return !chooser || setting.of.includes(current(chooser.key, chooser.default));
  }

  function field(setting) {
    const id = `field-${setting.key}`;
    const value = current(setting.key, "");
    const change = (event) => set(setting, event.target.value);
    const shared = { id, "data-key": setting.key, "aria-describedby": `${id}-help ${id}-mistake`, value };
    const words = [...new Set([...(written(setting.key) !== undefined ? [written(setting.key)] : []), ...setting.words])];
    const chosen = setting.closed && setting.words.length > 1;
    const control = chosen
      ? h("select", { ...shared, onchange: change }, h("option", { value: "" }, written(setting.key) === undefined ? `default: ${setting.default || "none"}` : `recipe: ${written(setting.key)}`),
        words.map((word) => h("option", { value: word }, word)))
      : h("input", { ...shared, oninput: change, placeholder: setting.default === "" ? "" : `default: ${setting.default}`, list: setting.words.length ? `${id}-words` : null, spellcheck: "false", autocomplete: "off" });
    control.value = value;
    const meaning = setting.choices[current(setting.key, setting.default)] ?? setting.meaning;
    const facts = [chosen ? "" : setting.values, setting.unit && `unit: ${setting.unit}`, setting.why && `why: ${setting.why}`, ...setting.papers.filter((paper) => !meaning.includes(paper))].filter(Boolean);
    return h("div", { class: answers.has(setting.key) ? "field changed" : "field", "data-field": setting.key },
      h("label", { for: id }, setting.key), control,
      setting.words.length && control.tagName === "INPUT" ? h("datalist", { id: `${id}-words` }, setting.words.map((word) => h("option", { value: word }))) : "",
      h("p", { class: "mistake", id: `${id}-mistake` }),
      h("p", { class: "soft", id: `${id}-help` }, meaning.replaceAll("`", ""), facts.length ? ` (${facts.join("; ")})` : ""));
  }

  function set(setting, value) {
    if (value === "" || value === written(setting.key)) answers.delete(setting.key); else answers.set(setting.key, value);
    const chooses = Object.keys(setting.choices).length > 0;
    fields.querySelector(`[data-field="${CSS.escape(setting.key)}"]`)?.classList.toggle("changed", answers.has(setting.key));
    if (chooses) build(setting.key);
    judge();
  }

  function build(focus = null) {
    const words = search.value.toLowerCase();
    const open = new Set([...fields.querySelectorAll("details[open]")].map((each) => each.dataset.section));
    const usable = settings.filter((each) => !each.section && each.key !== "recipe" && applies(each));
    const top = usable.filter((each) => each.top || (answers.has(each.key) && !words));
    const found = words ? usable.filter((each) => `${each.key} ${each.meaning}`.toLowerCase().includes(words)) : [];
    const sections = new Map();
    for (const each of usable) {
      const section = each.key.includes(".") ? each.key.split(".")[0] : "general";
      if (!top.includes(each)) sections.set(section, [...(sections.get(section) ?? []), each]);
    }
    fields.replaceChildren(...(words
      ? [h("p", { class: "soft" }, `${found.length} settings`), h("div", { class: "fields" }, found.slice(0, 40).map(field))]
      : [h("div", { class: "fields" }, top.map(field)),
        ...[...sections].map(([name, own]) => {
          const inside = h("div", { class: "fields" });
          const fill = () => { if (!inside.childElementCount) { inside.append(...own.map(field)); mark(); } };
          const details = h("details", { "data-section": name, open: open.has(name), ontoggle: (event) => { if (event.target.open) fill(); } },
            h("summary", {}, name, " ", h("span", { class: "soft" }, (settings.find((each) => each.key === name)?.meaning ?? "").replaceAll("`", ""))), inside);
          if (open.has(name)) fill();
          return details;
        })]));
    mark();
    if (focus) document.getElementById(`field-${focus}`)?.focus();
  }

  function mark() {
    for (const control of fields.querySelectorAll("[data-key]")) {
      const own = mistakes.filter(([place]) => place === control.dataset.key || place.startsWith(`${control.dataset.key}.`));
      control.setAttribute("aria-invalid", String(own.length > 0));
      control.closest(".field").querySelector(".mistake").textContent = own.map(([, text]) => text).join(" ");
    }
    const shown = new Set([...fields.querySelectorAll("[data-key]")].map((each) => each.dataset.key));
    const others = mistakes.filter(([place]) => ![...shown].some((key) => place === key || place.startsWith(`${key}.`)));
    general.replaceChildren(...others.map(([place, text]) => h("p", {}, `${place}: ${text}`)));
    for (const button of buttons) button.disabled = !unlocked() || (button.textContent === "Start" && mistakes.length > 0);
  }

  const form = () => ({ recipe: recipe.name, answers: Object.fromEntries(answers), run: run.value.trim() });

  function command() {
    const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
    line.textContent = ["workbench run", recipe.name, ...[...answers].map(([key, value]) => quoted(`${key}=${value}`)), "--out", quoted(`${placeOfRuns.folder}/${run.value}`)].join(" ");
  }

  async function judge(soon = false, verb = "check") {
    command();
    clearTimeout(timer);
    looking?.abort();
    if (!unlocked()) { general.textContent = "Looking at a form needs the token."; return; }
    const asked = new AbortController();
    looking = asked;
    try {
      const found = await post("/api/form/mistakes", form(), asked.signal);
      mistakes = found.mistakes;
      mark();
      if (mistakes.length) outcome.replaceChildren(h("p", { class: "soft" }, "Mend the fields that are marked first."));
      else if (Object.keys(found.code).length) outcome.replaceChildren(h("p", { class: "warning" }, `Executes Python code: ${Object.entries(found.code).map(([key, value]) => `${key}=${value}`).join(", ")}. Press Check to look.`));
      else if (live.checked || verb === "data") timer = setTimeout(() => look(verb), soon ? 0 : LATER_MS);
    } catch (error) { if (!asked.signal.aborted) say(error.message); }
  }

  async function look(verb) {
    clearTimeout(timer);
    looking?.abort();
    const asked = new AbortController();
    looking = asked;
    outcome.setAttribute("aria-busy", "true");
    outcome.replaceChildren(h("p", { class: "soft" }, verb === "plan" ? "Rehearses a step ..." : "Reads the rows ..."));
    try {
      const found = await postAsking(`/api/form/${verb}`, form(), asked.signal);
      if (found.error) {
        mistakes = found.mistakes ?? [];
        mark();
        outcome.replaceChildren(h("h2", {}, verb === "plan" ? "No plan" : "This run is refused"), h("pre", { class: "card bad command" }, found.error));
      } else {
        outcome.replaceChildren(h("h2", {}, { check: "What the model will see", plan: "What the run will take", data: "What the file holds" }[verb]), ...shown(found.parts));
      }
    } catch (error) { if (!asked.signal.aborted) outcome.replaceChildren(h("p", { class: "bad" }, error.message)); }
    finally { if (looking === asked) outcome.removeAttribute("aria-busy"); }
  }

  // A file of rows that was dropped: the server keeps it, and shows what the recipe makes of it.
  async function drop(file) {
    if (!unlocked()) { say("Dropping a file needs the token."); return; }
    if (file.size > MOST_BYTES) { say(`${file.name} has more than ${MOST_BYTES / 2 ** 20} MB. Write its path at data.train.`); return; }
    try {
      const url = await read(file);
      const { path } = await post("/api/form/file", { name: file.name.replace(/[^\w.-]+/g, "-"), base64: url.slice(url.indexOf(",") + 1) });
      answers.set("data.train", path);
      if (/\D/.test(written("data.held_out")?.replace(".", "") ?? "")) answers.set("data.held_out", "0.1"); // a recipe's own rows judge nobody else's
      build();
      await judge(false, "data");
    } catch (error) { say(error.message); }
  }

  async function begin() {
    try {
      const found = await postAsking("/api/form/start", form());
      location.hash = `#/jobs/${found.job}`;
    } catch (error) {
      if (error.mistakes?.length) { mistakes = error.mistakes; mark(); }
      say(error.message);
    }
  }

  async function load(name) {
    recipe = await get(`/api/recipes/${name.split("/").map(encodeURIComponent).join("/")}`);
    choice.value = name;
    answers.clear();
    mistakes = [];
    run.value = recipe.run;
    about.lastChild.textContent = recipe.text;
    build();
    judge(true);
  }

  await load(start);
  return {
    element: h("div", {
      ondragover: (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); },
      ondrop: (event) => { if (event.dataTransfer.files.length) { event.preventDefault(); drop(event.dataTransfer.files[0]); } },
    }, h("h1", {}, "New run"),
      h("div", { class: "columns" },
        h("div", {},
          h("div", { class: "fields" },
            h("div", { class: "field" }, h("label", { for: "recipe" }, "Recipe"), choice),
            h("div", { class: "field" }, h("label", { for: "run-name" }, "Name of the run"), run)),
          about,
          h("p", { class: "row" }, h("button", { type: "button", disabled: !unlocked(), onclick: () => file.click() }, "Rows of your own"), file,
            h("span", { class: "soft" }, `or drop a file here (${MOST_BYTES / 2 ** 20} MB at most): it shows what the file holds, and trains on it.`)),
          h("div", { class: "field" }, h("label", { for: "search" }, "Find a setting"), search),
          general, fields),
        h("div", { class: "stay" }, line,
          h("div", { class: "row actions" }, buttons, h("label", {}, live, " check after each change")), outcome))),
    title: "New run",
    watch: "",
    hear() {},
    close() { clearTimeout(timer); looking?.abort(); },
  };
}

function shown(parts) {
  const examples = parts.filter((part) => part.example !== undefined);
  return [
    ...examples.map((part) => h("div", { class: "card" }, h("h3", {}, part.example),
      h("div", { class: "example" }, part.pieces.map(([text, loss]) => (loss ? h("mark", {}, text) : text))))),
    examples.length ? h("p", { class: "soft" }, h("span", { class: "example" }, h("mark", {}, "Marked")), " text carries loss; the rest is read only.") : "",
    ...parts.filter((part) => part.text).map((part) => h("pre", { class: examples.length || part.text.includes("│") ? "card" : "card command", tabindex: "0" }, part.text)),
    ...parts.filter((part) => part.head).map((part) => table(part.head.map((name, place) => ({ name, right: part.right[place] })), part.rows, { caption: part.table })),
  ];
}
