// Rows of metrics as they come, and the plots of them: one plot a measure, all runs over each other.
/* global uPlot */

import { h } from "./dom.js";
import { bytes, count, duration, number } from "./units.js";

const HIDDEN = ["step", "tokens", "tokens_seen", "supervised_tokens", "elapsed_s", "loss_low", "loss_high", "held_out_loss", "asked"];
const ORDER = ["loss", "learning_rate", "grad_norm", "tokens_per_second", "peak_bytes"];
const TITLES = { loss: "Loss", learning_rate: "Learning rate", grad_norm: "Gradient norm", tokens_per_second: "Tokens a second", peak_bytes: "Peak memory", data_wait: "Share of a step that waits for data" };
const WHOLE = [...Array(9).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
export const X = { step: "steps", tokens_seen: "tokens", elapsed_s: "time" };
const SHOWN = { step: number, tokens_seen: count, elapsed_s: duration, peak_bytes: bytes, tokens_per_second: count };

// The columns of one run or member.
export class Curve {
  constructor(label, colour) { this.label = label; this.colour = colour; this.columns = {}; this.rows = 0; }

  add({ goes_on: goesOn, columns }) {
    if (!goesOn) { this.columns = {}; this.rows = 0; }
    const more = (columns.step ?? []).length;
    for (const name of Object.keys(columns)) this.columns[name] ??= new Array(this.rows).fill(null);
    for (const name of Object.keys(this.columns)) {
      const values = columns[name] ?? new Array(more).fill(null);
      for (let row = 0; row < more; row += 1) this.columns[name].push(values[row]);
    }
    this.rows += more;
    // A resumed run is another process, which counts from nothing: the run has what both took.
    let most = 0;
    this.columns.peak_bytes = this.columns.peak_bytes?.map((value) => (value === null ? null : (most = Math.max(most, value))));
    if (!this.columns.peak_bytes) delete this.columns.peak_bytes;
  }
}

// Exponential moving average without the bias of its start (Kingma and Ba 2015, section 3).
export function smooth(values, weight) {
  if (weight === 0) return values;
  let mean = 0;
  let known = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = weight * mean + (1 - weight) * value;
    known = weight * known + (1 - weight);
    return mean / known;
  });
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Plots {
  constructor(curves) {
    this.curves = curves;
    this.x = "step";
    this.weight = 0.6;
    this.log = false;
    this.charts = new Map();
    this.place = h("div", { class: "plots" });
    this.note = h("p", { class: "soft", role: "status" });
    this.flat = h("p", { class: "soft" });
    this.element = h("section", { "aria-label": "Curves" }, this.controls(), this.note, this.place, this.flat);
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.place);
    this.theme = matchMedia("(prefers-color-scheme: dark)");
    this.rebuild = () => { this.clear(); this.draw(); };
    this.theme.addEventListener("change", this.rebuild);
  }

  controls() {
    const x = h("select", { id: "x", onchange: (event) => { this.x = event.target.value; this.rebuild(); } },
      Object.entries(X).map(([key, name]) => h("option", { value: key }, name)));
    const shown = h("output", { for: "smoothing" }, String(this.weight));
    const smoothing = h("input", { id: "smoothing", type: "range", min: "0", max: "0.99", step: "0.01", value: String(this.weight),
      oninput: (event) => { this.weight = Number(event.target.value); shown.textContent = event.target.value; this.draw(); } });
    return h("div", { class: "row" },
      h("label", {}, "Against ", x),
      h("label", {}, "Smoothing ", smoothing, " ", shown),
      h("label", {}, h("input", { type: "checkbox", onchange: (event) => { this.log = event.target.checked; this.rebuild(); } }), " Logarithmic"),
      h("button", { type: "button", onclick: this.rebuildLater() }, "Whole range"));
  }

  rebuildLater() { return () => this.rebuild(); }

  soon() {
    this.frame ??= requestAnimationFrame(() => { this.frame = undefined; this.draw(); });
  }

  measures() {
    const known = new Set(this.curves.flatMap((curve) => Object.keys(curve.columns)).filter((name) => !HIDDEN.includes(name)).map((name) => name.split("[")[0]));
    known.delete("held_out_loss");
    return [...ORDER.filter((name) => known.has(name)), ...[...known].filter((name) => !ORDER.includes(name))];
  }

  // Series of a plot: {label, xs, ys, stroke, width, dash, points}.
  lines(measure) {
    const found = [];
    for (const curve of this.curves) {
      const xs = curve.columns[this.x];
      if (!xs) continue;
      const names = Object.keys(curve.columns).filter((name) => name === measure || name.startsWith(`${measure}[`));
      for (const name of names) {
        const part = name === measure ? "" : ` ${name.slice(measure.length)}`;
        const label = this.curves.length > 1 ? `${curve.label}${part}` : `${measure.replaceAll("_", " ")}${part}`;
        const stroke = part ? colour(`--series-${(curve.colour + names.indexOf(name)) % 8}`) : colour(`--series-${curve.colour % 8}`);
        const ys = curve.columns[name];
        const raw = measure === "loss" && this.weight > 0 && !part;
        if (raw && curve.columns.loss_low) {
          found.push({ label: "", xs, ys: curve.columns.loss_low.map((low, row) => low ?? ys[row]), stroke: `${stroke}33`, width: 1 });
          found.push({ label: "", xs, ys: curve.columns.loss_high.map((high, row) => high ?? ys[row]), stroke: `${stroke}33`, width: 1, band: true, fill: `${stroke}22` });
        } else if (raw) found.push({ label: "", xs, ys, stroke: `${stroke}55`, width: 1 });
        found.push({ label, xs, ys: measure === "loss" ? smooth(ys, this.weight) : ys, stroke, width: 2 });
      }
      if (measure === "loss") {
        for (const name of Object.keys(curve.columns).filter((each) => each === "held_out_loss" || each.startsWith("held_out_loss["))) {
          const there = curve.columns[name].flatMap((value, row) => (value === null ? [] : [row]));
          const part = name.slice("held_out_loss".length);
          const label = this.curves.length > 1 ? `${curve.label} held out ${part}` : `held-out loss ${part}`;
          const stroke = colour(`--series-${(this.curves.length > 1 ? curve.colour : curve.colour + 1) % 8}`);
          found.push({ label, xs: there.map((row) => xs[row]), ys: there.map((row) => curve.columns[name][row]), stroke, width: 2, dash: [6, 4], points: true });
        }
      }
    }
    return found;
  }

  draw() {
    if (!this.element.isConnected) return;
    const measures = this.measures();
    if (measures.length === 0) { this.note.textContent = "No step is done yet."; return; }
    const rows = Math.max(...this.curves.map((curve) => curve.rows));
    this.note.textContent = this.curves.some((curve) => curve.columns.loss_low)
      ? `Long runs are drawn in ${rows.toLocaleString("en")} points, each the mean of several steps; the band is their lowest and highest loss. Drag over a plot to look closer.`
      : "Drag over a plot to look closer.";
    const flat = measures.map((measure) => [measure, this.unchanged(measure)]).filter(([, value]) => value !== null);
    this.flat.textContent = flat.length ? `Not plotted, as it hardly changes: ${flat.map(([measure, value]) => `${(TITLES[measure] ?? measure.replaceAll("_", " ")).toLowerCase()} ${(SHOWN[measure] ?? number)(value)}`).join(", ")}.` : "";
    for (const measure of measures) if (!flat.some(([each]) => each === measure)) this.chart(measure);
  }

  // The last value of a measure that hardly changes, by a hundredth or on its axis; null for others, and for the loss.
  unchanged(measure) {
    const values = measure === "loss" ? [] : this.lines(measure).flatMap((line) => line.ys.filter((value) => value !== null));
    const [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
    return values.length && high - low <= (measure === "data_wait" ? 0.1 : 0.01 * Math.abs(high)) ? values.at(-1) : null;
  }

  chart(measure) {
    const lines = this.lines(measure);
    const data = joined(lines);
    const shape = JSON.stringify(lines.map((line) => [line.label, line.stroke]));
    const known = this.charts.get(measure);
    if (known?.shape === shape) {
      const zoomed = known.plot.scales.x.min > data[0][0] || known.plot.scales.x.max < known.last;
      known.plot.setData(data, !zoomed);
      if (zoomed) known.plot.redraw();
      known.last = data[0].at(-1);
      this.describe(known, measure, lines);
      return;
    }
    known?.plot.destroy();
    const card = known?.card ?? this.place.appendChild(h("div", { class: "card" }, h("h3", {}, TITLES[measure] ?? measure.replaceAll("_", " ")), h("div", { class: "plot", role: "img" })));
    const target = card.lastChild;
    const plot = new uPlot(this.options(measure, lines, target), data, target);
    this.charts.set(measure, { plot, card, shape, last: data[0].at(-1) });
    this.describe(this.charts.get(measure), measure, lines);
  }

  // A plot in words, for those who do not see it.
  describe({ card }, measure, lines) {
    const ends = lines.filter((line) => line.label).map((line) => `${line.label} ${number(line.ys.filter((value) => value !== null).at(-1))}`);
    card.lastChild.setAttribute("aria-label", `${TITLES[measure] ?? measure} against ${X[this.x]}. Last values: ${ends.join(", ")}.`);
  }

  options(measure, lines, target) {
    const shown = SHOWN[measure] ?? number;
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 }, font: "12px system-ui" };
    return {
      width: Math.max(200, target.clientWidth), height: measure === "loss" ? 320 : 220,
      scales: { x: { time: false }, y: { ...(measure === "data_wait" ? { range: [0, 1] } : {}), distr: this.log && lines.every((line) => line.ys.every((value) => value === null || value > 0)) ? 3 : 1 } },
      cursor: { drag: { x: true, y: false }, points: { size: 6 } },
      axes: [
        { ...axis, ...(this.x === "step" ? { incrs: WHOLE } : {}), values: (_, ticks) => ticks.map((tick) => SHOWN[this.x](tick)) },
        { ...axis, size: 64, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : shown(tick))) },
      ],
      series: [
        { label: X[this.x], value: (plot, value, _, place) => SHOWN[this.x](known(plot.data[0], place)) },
        ...lines.map((line) => ({
          label: line.label, stroke: line.stroke, width: line.width, dash: line.dash, spanGaps: true,
          points: { show: (line.points === true && line.ys.length < 200) || line.ys.length < 2, size: 6, fill: line.stroke },
          value: (plot, _, series, place) => { const value = known(plot.data[series], place); return value === null ? "" : shown(value); },
        })),
      ],
      bands: lines.flatMap((line, place) => (line.band ? [{ series: [place + 1, place], fill: line.fill }] : [])),
      hooks: { init: [(plot) => hideUnnamed(plot, lines)] },
    };
  }

  resize() {
    for (const { plot, card } of this.charts.values()) {
      const width = Math.max(200, card.lastChild.clientWidth);
      if (width !== plot.width) plot.setSize({ width, height: plot.height });
    }
  }

  clear() {
    for (const { plot } of this.charts.values()) plot.destroy();
    this.charts.clear();
    this.place.replaceChildren();
  }

  close() {
    this.clear();
    this.sizes.disconnect();
    this.theme.removeEventListener("change", this.rebuild);
  }
}

// The value at a place, or the last one before it; without a place, the last of all.
const known = (values, place) => values.slice(0, (place ?? values.length) + 1).findLast((value) => value !== null && value !== undefined) ?? null;

const joined = (lines) => {
  if (lines.length && lines.every((line) => line.xs === lines[0].xs)) return [lines[0].xs, ...lines.map((line) => line.ys)];
  return uPlot.join(lines.map((line) => [line.xs, line.ys]));
};

const hideUnnamed = (plot, lines) => {
  const rows = plot.root.querySelectorAll(".u-legend .u-series");
  lines.forEach((line, place) => { if (!line.label && rows[place + 1]) rows[place + 1].hidden = true; });
};
