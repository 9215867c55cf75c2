// All runs of the folder.

import { h, status, table } from "./dom.js";
import { bytes, count, duration, number, when } from "./units.js";

export function progress(run) {
  if (!run.step) return "";
  const text = run.steps ? `${number(run.step)} of ${number(run.steps)} steps` : `${number(run.step)} steps`;
  if (run.status !== "running" || !run.steps) return text;
  return [text, run.left_s === null ? "" : `, ${duration(run.left_s)} left`, h("progress", { max: run.steps, value: run.step, "aria-label": text })];
}

export function runsPage() {
  const chosen = new Set();
  const place = h("div");
  const compare = h("a", { class: "button", href: "#/compare" }, "Compare");
  const filter = h("input", { type: "search", placeholder: "name, recipe, model, method", "aria-label": "Filter runs", oninput: () => show() });
  const bar = h("div", { class: "row" }, filter, compare, h("a", { class: "button", href: "#/new" }, "New run"));
  let runs = [];

  function choose(name, on) {
    if (on) chosen.add(name); else chosen.delete(name);
    const words = [...chosen].map((each) => `run=${encodeURIComponent(each)}`).join("&");
    compare.href = chosen.size > 1 ? `#/compare?${words}` : "#/";
    compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare: choose two or more";
    compare.setAttribute("aria-disabled", String(chosen.size < 2));
  }

  function line(run) {
    const box = h("input", { type: "checkbox", checked: chosen.has(run.name), "aria-label": `Choose ${run.name}`, onchange: (event) => choose(run.name, event.target.checked) });
    return [
      box,
      [h("a", { href: `#/run/${encodeURIComponent(run.name)}` }, run.name), run.reason ? h("div", { class: "soft" }, run.reason) : ""],
      status(run.status), [run.recipe, run.method].filter(Boolean).join(", "), run.model ?? "",
      progress(run), number(run.before), number(run.after ?? (run.status === "done" ? null : run.loss)),
      run.tokens_per_second ? `${count(run.tokens_per_second)}/s` : "", bytes(run.peak_bytes), duration(run.elapsed_s), when(run.created),
    ];
  }

  function show() {
    const words = filter.value.toLowerCase();
    const found = runs.filter((run) => [run.name, run.recipe, run.model, run.method, run.status].join(" ").toLowerCase().includes(words));
    if (runs.length === 0) {
      place.replaceChildren(h("p", {}, "No runs yet. ", h("a", { href: "#/new" }, "Start one"), ", or write ", h("code", {}, "workbench run sft/quickstart"), " in a terminal."));
      return;
    }
    const focused = document.activeElement?.getAttribute("aria-label");
    place.replaceChildren(table(
      ["", { name: "run", kind: "name" }, "status", "recipe, method", "model", "progress", { name: "loss before", right: true }, { name: "after or now", right: true },
        { name: "tokens", right: true }, { name: "memory", right: true }, { name: "time", right: true }, "started"],
      found.map(line), { stacked: true, caption: "Runs" }));
    if (focused) place.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  }

  choose("", false);
  return {
    element: h("div", {}, h("h1", {}, "Runs"), bar, place),
    title: "Runs",
    watch: "",
    hear(event, data) { if (event === "runs") { runs = data; show(); } },
  };
}
