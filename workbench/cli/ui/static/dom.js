// Elements made of text, never of HTML: what a run holds is shown, not executed.

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

// A table of rows whose cells are text, numbers or elements. A column is a name, or {name, right, words}.
export function table(columns, rows, { stacked = false, caption = null } = {}) {
  const known = columns.map((column) => (typeof column === "string" ? { name: column } : column));
  const kind = (column) => (column.right ? "right" : column.words ? "words" : column.kind ?? null);
  return h("div", { class: "wide", tabindex: stacked ? null : "0", role: stacked ? null : "region", "aria-label": stacked ? null : caption ?? "Table" },
    h("table", { class: stacked ? "stacked" : null },
      caption && h("caption", { hidden: true }, caption),
      h("thead", {}, h("tr", {}, known.map((column) => h("th", { class: column.right ? "right" : null, scope: "col" }, column.name)))),
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
