// Which parts of which blocks train now, and which layers trained when.

import { h } from "./dom.js";
import { count, number } from "./units.js";

const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}

const trains = (change, layer) => change[1][layer] === "1";

// Neighbouring blocks that are alike, as one row.
function grouped(layers, now) {
  const found = [];
  for (const each of layers) {
    const key = JSON.stringify([each.parts, trains(now, each.layer)]);
    const last = found.at(-1);
    if (last?.key === key && /^block \d+$/.test(each.name) && /^block \d+$/.test(last.first)) { last.last = each.name; last.blocks += 1; } else found.push({ key, first: each.name, last: each.name, blocks: 1, parts: each.parts, on: trains(now, each.layer) });
  }
  return found.map((each) => ({ ...each, name: each.blocks > 1 ? `blocks ${each.first.slice(6)} to ${each.last.slice(6)}` : each.first }));
}

function cell(part, { on, blocks }) {
  if (part === undefined) return h("td");
  const size = `${count(part)}${blocks > 1 ? " each" : ""}`;
  if (part > 0 && on) return h("td", { class: "trains" }, size);
  if (part > 0) return h("td", { class: "waits" }, `${size}, frozen now`);
  return h("td", { class: "frozen" }, "frozen");
}

export class Layers {
  constructor() { this.element = h("section", { "aria-label": "Layers that train", hidden: true }); }

  // A step was done: the picture reaches to it.
  reach(step) {
    if (!this.figure) return;
    const figure = strip(this.layers, this.changes, Math.max(step ?? 0, this.changes.at(-1)[0]));
    this.figure.replaceWith(figure);
    this.figure = figure;
  }

  show({ layers = [], changes = [] }, step) {
    this.figure = null;
    this.element.hidden = layers.length === 0;
    if (layers.length === 0) return;
    this.layers = layers;
    this.changes = changes;
    const now = changes.at(-1);
    if (changes.length > 1) this.figure = strip(layers, changes, Math.max(step ?? 0, now[0]));
    const kinds = [...new Set(layers.flatMap((layer) => Object.keys(layer.parts)))];
    const known = ["embedding", "virtual tokens", "q", "k", "v", "qkv", "o", "gate", "gate, up", "up", "down", "router", "norm", "other", "head"];
    kinds.sort((one, other) => known.indexOf(one) - known.indexOf(other));
    const rows = grouped(layers, now);
    const values = layers.flatMap((layer) => Object.values(layer.parts).map((part) => [part, trains(now, layer.layer)]));
    const all = values.reduce((sum, [part]) => sum + part, 0);
    const on = values.reduce((sum, [part, live]) => sum + (live ? part : 0), 0);
    this.element.replaceChildren(
      h("h2", {}, "Layers that train"),
      h("p", { class: "soft" }, on === all ? `${count(all)} values train` : `${count(on)} of ${count(all)} values train now`,
        changes.length > 1 ? `, since step ${number(Math.max(1, now[0]))}; freezing changes them during the run.` : "."),
      h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Parts of each block that train" },
        h("table", { class: "parts" },
          h("thead", {}, h("tr", {}, h("th", { scope: "col" }, ""), kinds.map((kind) => h("th", { scope: "col" }, kind)))),
          h("tbody", {}, rows.map((row) => h("tr", {}, h("th", { scope: "row" }, row.name), kinds.map((kind) => cell(row.parts[kind], row))))))),
      ...(this.figure ? [this.figure] : []));
  }
}

// A line for each layer that the method lets train, the last one on top; filled from step to step where it does.
function strip(layers, changes, last) {
  const learning = layers.filter((layer) => Object.values(layer.parts).some((part) => part > 0));
  const numbers = [...new Set(learning.map((layer) => layer.layer))].sort((one, other) => one - other);
  const picture = shape("svg", { viewBox: `0 0 ${last} ${numbers.length}`, preserveAspectRatio: "none", class: "strip", role: "img",
    "aria-label": `Layers that trained, from step 1 to step ${last}: ${changes.length} different sets.` });
  numbers.forEach((layer, place) => {
    let begin = null;
    changes.forEach((change, index) => {
      const live = trains(change, layer);
      const at = Math.max(0, change[0] - 1);
      if (live && begin === null) begin = at;
      const end = index === changes.length - 1 ? last : null;
      if (begin !== null && (!live || end !== null)) {
        const stop = live ? end : at;
        if (stop > begin) picture.append(shape("rect", { x: begin, y: numbers.length - 1 - place + 0.08, width: stop - begin, height: 0.84 }));
        begin = null;
      }
    });
  });
  const name = (layer) => layers.find((each) => each.layer === layer).name;
  return h("figure", { class: "card" },
    h("figcaption", {}, `By step: ${name(numbers.at(-1))} on top, ${name(numbers[0])} at the bottom; filled where a layer trains.`),
    picture, h("div", { class: "ends" }, h("span", {}, "step 1"), h("span", {}, `step ${number(last)}`)));
}
