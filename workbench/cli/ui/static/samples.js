// Sample answers of a run: the same prompts at each evaluation, the newest answers first.

import { h } from "./dom.js";
import { number } from "./units.js";

const FIRST = 4; // steps that are shown before somebody asks for all
const LONG = 400; // characters from which a prompt is folded

const named = (step) => (step === 0 ? "before" : `step ${number(step)}`);

// An episode turn by turn: calls of tools and what these gave stand on lines of their own.
export function turns(text) {
  const lines = text.split("\n");
  if (!lines.some((line) => /^\[\w+\] /.test(line))) return text;
  return lines.map((line) => {
    const [, role, said] = /^\[(\w+)\] (.*)$/.exec(line) ?? [null, "model", line];
    return h("div", { class: `step ${role === "model" || role === "call" ? role : "tool"}` }, h("span", { class: "soft" }, role), " ", said);
  });
}

// Episodes of the held-out rows: what was asked, what the model and its tools said, and the reward, before and after.
export function episodes({ columns, rows }) {
  const at = (row, name) => row[columns.indexOf(name)] ?? null;
  const whole = rows.filter((row) => typeof turns(at(row, "after") ?? "") !== "string" || typeof turns(at(row, "before") ?? "") !== "string");
  return whole.slice(0, 20).map((row) => h("div", { class: "card sample" }, h("h3", {}, at(row, "row")), h("div", { class: "example" }, at(row, "prompt")),
    h("div", { class: "talk" }, ["before", "after"].filter((name) => at(row, name) !== null).map((name) => h("div", {},
      h("p", { class: "soft" }, `${name}: reward ${number(at(row, `reward_${name}`))}`), turns(at(row, name)) || "(nothing)")))));
}

export class Samples {
  constructor(hint) {
    this.open = new Set();
    this.place = h("div");
    this.hint = hint;
    this.element = h("section", { "aria-label": "Sample answers" });
    this.show([]);
  }

  show(prompts) {
    this.prompts = prompts;
    this.element.hidden = prompts.length === 0 && !this.hint;
    this.place.replaceChildren(...(prompts.length ? prompts.map((prompt) => this.card(prompt)) : [h("p", { class: "soft" }, this.hint)]));
    this.element.replaceChildren(h("h2", {}, "Sample answers"), this.place);
  }

  card({ row, prompt, reference, answers, picture }) {
    const all = this.open.has(row);
    const shown = all || answers.length <= FIRST + 1 ? answers : [...answers.slice(0, FIRST), answers.at(-1)];
    const text = h("div", { class: "example" }, prompt);
    return h("div", { class: "card sample" },
      h("h3", {}, row),
      picture && h("div", { class: "thumb" }, h("img", { src: picture, alt: `Picture of ${row}` })),
      prompt.length > LONG ? h("details", {}, h("summary", {}, "… ", prompt.slice(-160).replace(/^\S*\s+/, "").trim()), text) : text,
      h("dl", { class: "answers" },
        shown.map(({ step, answer }, place) => [
          h("dt", {}, named(step)),
          h("dd", { class: place === 0 ? "newest" : null }, turns(answer) || h("span", { class: "soft" }, "(empty)")),
        ]),
        reference ? [h("dt", {}, "reference"), h("dd", { class: "reference" }, reference)] : ""),
      shown.length < answers.length || all
        ? h("button", { type: "button", class: "plain", "aria-expanded": String(all), onclick: () => this.turn(row) }, all ? "Fewer steps" : `All ${number(answers.length)} steps`) : "");
  }

  turn(row) {
    if (this.open.has(row)) this.open.delete(row); else this.open.add(row);
    const place = this.prompts.findIndex((prompt) => prompt.row === row);
    const card = this.card(this.prompts[place]);
    this.place.children[place].replaceWith(card);
    card.querySelector("button.plain")?.focus();
  }
}
