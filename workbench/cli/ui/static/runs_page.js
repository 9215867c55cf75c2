// All runs of the folder.

import { changes, h, status, table } from "./dom.js";
import { bytes, count, duration, number, when } from "./units.js";

export function progress(run) {
  if (!run.step) return "";
  const text = run.steps && (run.status !== "done" || run.step !== run.steps) ? `${number(run.step)} of ${number(run.steps)} steps` : `${number(run.step)} steps`;
  if (run.status !== "running" || !run.steps) return text;
  return [text, run.left_s === null ? "" : `, ${duration(run.left_s)} left`, h("progress", { max: run.steps, value: run.step, "aria-label": text })];
}

export function runsPage() {
  const chosen = new Set();
  const place = h("div", {}, h("p", { class: "soft", role: "status" }, "Reads the folder ..."));
  const compare = h("a", { class: "button", href: "#/compare" }, "Compare");
  const filter = h("input", { type: "search", placeholder: "name, tag, recipe, model", "aria-label": "Filter runs", oninput: () => show() });
  const bar = h("div", { class: "row" }, filter, compare, h("a", { class: "button", href: "#/new" }, "New run"));
  const sort = { by: "created", down: true, set(by) { sort.down = by === sort.by ? !sort.down : !["name", "kind"].includes(by); sort.by = by; show(); } };
  const keys = { kind: (run) => [run.recipe, run.model, run.method].join(" "), score: (run) => run.score?.after ?? run.score?.before, after: (run) => run.after ?? run.loss };
  const key = (run) => (keys[sort.by] ?? ((each) => each[sort.by]))(run) ?? null;
  let runs = null;

  // Runs without a value come last, whichever way the others are sorted.
  function order(one, other) {
    const [first, second] = [key(one), key(other)];
    if (first === null || second === null) return Number(first === null) - Number(second === null);
    const way = typeof first === "string" ? first.localeCompare(second) : first - second;
    return sort.down ? -way : way;
  }

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
      [h("a", { href: `#/run/${encodeURIComponent(run.name)}` }, run.name), (run.tags ?? []).map((tag) => h("span", { class: "tag" }, tag)),
        run.note || run.reason ? h("div", { class: "soft" }, [run.note, run.reason].filter(Boolean).join(" · ")) : ""],
      [status(run.status), h("div", { class: "soft figures" }, progress(run))],
      [[run.recipe, run.method].filter(Boolean).join(", "), h("div", { class: "soft" }, (run.model ?? "").split("/").at(-1))], ...changes(run),
      run.tokens_per_second ? `${count(run.tokens_per_second)}/s` : "", bytes(run.peak_bytes), duration(run.elapsed_s), h("span", { class: "figures" }, when(run.created)),
    ];
  }

  function show() {
    const words = filter.value.toLowerCase();
    if (runs === null) return;
    const found = runs.filter((run) => [run.name, run.recipe, run.model, run.method, run.status, run.note, ...(run.tags ?? [])].join(" ").toLowerCase().includes(words)).sort(order);
    if (runs.length === 0) {
      place.replaceChildren(h("p", {}, "No runs yet. ", h("a", { href: "#/new" }, "Start one"), ", or write ", h("code", {}, "workbench run sft/quickstart"), " in a terminal."));
      return;
    }
    const focused = document.activeElement?.getAttribute("aria-label");
    place.replaceChildren(table(
      [{ name: "", said: "choose" }, { name: "run", kind: "name", by: "name" }, { name: "status", by: "status" }, { name: "recipe, model", by: "kind" }, { name: "score", by: "score" },
        { name: "loss", by: "after" }, { name: "tokens", right: true, by: "tokens_per_second" }, { name: "memory", right: true, by: "peak_bytes" },
        { name: "time", right: true, by: "elapsed_s" }, { name: "started", by: "created" }],
      found.map(line), { stacked: true, caption: "Runs", sort }));
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
