// Elements made of text, never of HTML: what a run holds is shown, not executed.

import { number } from "./units.js";

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Puts children in place of those that an element has.
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
}

let unsay = 0;
export function say(text) {
  const place = document.getElementById("said");
  place.textContent = text;
  clearTimeout(unsay);
  unsay = setTimeout(() => { place.textContent = ""; }, 8000);
}

// A table of rows whose cells are text, numbers or elements. A column is a name, or {name, right, words, by}. `sort`:
// {by, down, set}; a column with a `by` is sorted by a click, whoever shows the rows sorts them.
export function table(columns, rows, { stacked = false, caption = null, sort = null } = {}) {
  const known = columns.map((column) => (typeof column === "string" ? { name: column } : column));
  const kind = (column) => (column.right ? "right" : column.words ? "words" : column.kind ?? null);
  return h("div", { class: "wide", tabindex: stacked ? null : "0", role: stacked ? null : "region", "aria-label": stacked ? null : caption ?? "Table" },
    h("table", { class: stacked ? "stacked" : null },
      caption && h("caption", { hidden: true }, caption),
      h("thead", {}, h("tr", {}, known.map((column) => h("th",
        { class: column.right ? "right" : null, scope: "col", "aria-sort": sort && column.by === sort.by ? (sort.down ? "descending" : "ascending") : null },
        sort && column.by ? h("button", { type: "button", class: "plain", "aria-label": `Sort by ${column.name}`, onclick: () => sort.set(column.by) }, column.name, column.by === sort.by ? (sort.down ? " ↓" : " ↑") : "") : column.name || h("span", { class: "unseen" }, column.said ?? ""))))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, number) =>
        h("td", { class: kind(known[number]), "data-label": known[number].name || null }, cell ?? "")))))));
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined)
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export function status(word) {
  return h("span", { class: `status ${word}` }, word);
}

const short = (value) => number(Number(value.toPrecision(3)));

// A score before and after, with its interval and what that means.
export function change(before, after, { low = null, high = null, better = null, name = "" } = {}) {
  const word = better === null ? (low !== null && before !== null && after !== null && short(before) !== short(after) ? "may be chance" : "") : better ? "better" : "worse";
  if (before === null && after === null) return "";
  return h("span", {}, name && h("span", { class: "soft" }, `${name} `), h("span", { class: "figures" }, [before, after].filter((value) => value !== null).map(short).join(" → ")),
    low === null && !word ? "" : h("span", { class: "beneath" }, low === null ? "" : `${short(low)} to ${short(high)} `,
      word && h("span", { class: better === null ? "soft" : better ? "good" : "bad" }, `${better === null ? "" : better ? "✓ " : "✗ "}${word}`)));
}

const better = ({ before = null, after = null }) => (before === null || after === null || short(before) === short(after) ? null : after < before);

export const changes = (run) => [
  run.score ? change(run.score.before, run.score.after, run.score) : "",
  change(run.before ?? null, run.after ?? (run.status === "done" ? null : run.loss ?? null), { better: better(run) }),
];

// Text with a button that copies it.
export function copied(text) {
  return h("div", { class: "copied" }, h("pre", { class: "command", tabindex: "0" }, text),
    h("button", { type: "button", "aria-label": `Copy ${text}`, onclick: () => navigator.clipboard.writeText(text).then(() => say("Copied."), () => say("The browser does not let this page copy: select the text.")) }, "Copy"));
}

// A file as a data: address.
export function read(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}
