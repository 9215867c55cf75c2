// One run, while it trains and afterwards; and several over each other.

import { Curve, Plots } from "./curves.js";
import { change, changes, copied, facts, fill, h, say, status, table } from "./dom.js";
import { Layers } from "./layers.js";
import { progress } from "./runs_page.js";
import { episodes, Samples } from "./samples.js";
import { get, post, unlocked } from "./server.js";
import { bytes, count, duration, number, when } from "./units.js";

const watched = (curves) => curves.map(([run, curve]) => `curve=${encodeURIComponent(`${run}//${curve}`)}`).join("&");
const MOST = 32; // curves of one page

export async function runPage(name, member = null) {
  const run = await get(`/api/runs/${encodeURIComponent(name)}`);
  const shownCurves = member === null ? run.curves.slice(0, MOST) : run.curves.filter((curve) => curve === member);
  const curves = new Map(shownCurves.map((curve, place) => [curve, new Curve(curve.replace("members/", "") || name, place)]));
  const plots = new Plots([...curves.values()]);
  const top = h("div");
  const rest = h("div");
  const samples = new Samples(run.no_samples);
  const layers = new Layers();
  let jobs = [];
  let marks = {};
  let now = run;

  const report = `/runs/${encodeURIComponent(name)}/report.html?ticket=${run.ticket}`;

  const tags = h("input", { value: (run.tags ?? []).join(", "), placeholder: "baseline, keep" });
  const note = h("textarea", { value: run.note ?? "" });
  const notes = h("form", { class: "card", hidden: true, onsubmit: async (event) => {
    event.preventDefault();
    const words = tags.value.split(",").map((tag) => tag.trim()).filter(Boolean);
    try { await post(`/api/runs/${encodeURIComponent(name)}/notes`, { tags: words, note: note.value }); notes.hidden = true; say("Kept."); } catch (error) { say(error.message); }
  } }, h("label", { class: "field" }, "Tags, with commas between them", tags), h("label", { class: "field" }, "Note", note), h("button", { class: "main" }, "Keep"));

  function act(label, path, disabled, done, kind = null, why = null) {
    return h("button", { type: "button", class: kind, disabled: Boolean(disabled) || !unlocked(), title: why ?? (unlocked() ? null : "needs the token"),
      onclick: async () => { try { const answer = await post(path); say(done); if (answer.job) location.hash = `#/jobs/${answer.job}`; } catch (error) { say(error.message); } } }, label);
  }

  function head() {
    const job = jobs.findLast((each) => each.run === name && !["done", "stopped", "failed"].includes(each.state));
    const all = `/api/runs/${encodeURIComponent(name)}`;
    const last = jobs.findLast((each) => each.run === name);
    const elsewhere = now.status === "running" && !job;
    fill(top,
      h("h1", {}, member === null ? name : [h("a", { href: `#/run/${encodeURIComponent(name)}` }, name), ` / ${member.split("/").at(-1)}`], " ", status(now.status)),
      now.note || now.tags?.length ? h("p", {}, (now.tags ?? []).map((tag) => h("span", { class: "tag" }, tag)), now.note) : "",
      now.reason ? h("p", { class: now.status === "failed" ? "bad" : "warning" }, now.reason) : "",
      facts([
        ["recipe", now.recipe], ["method", now.method], ["model", now.model?.split("/").at(-1)], ["progress", progress(now)],
        [now.score?.name, now.score && change(now.score.before, now.score.after, { ...now.score, name: "" })], ["loss", changes(now)[1]], ["last training loss", number(now.loss)],
        ["tokens a second", count(now.tokens_per_second)], ["peak memory", bytes(now.peak_bytes)],
        ["time", duration(now.elapsed_s)], ["time left", duration(now.left_s)], ["started", when(now.created)],
      ]),
      h("div", { class: "row" },
        run.report || now.report ? h("a", { class: "button", href: report, target: "_blank", rel: "noopener" }, "Report") : "",
        job ? act("Stop and save", `/api/jobs/${job.number}/stop`, job.state === "stopping", "Asked to stop: it saves a checkpoint first.") : "",
        now.log ? h("a", { class: "button", href: `#/log/${encodeURIComponent(name)}` }, "Log") : "",
        last && (!now.log || last.verb !== "run" || last.state === "failed") ? h("a", { class: "button", href: `#/jobs/${last.number}` }, now.log ? `What job ${last.number} printed` : "Log") : "",
        now.status === "running" ? act(marks.asked ? "Evaluates after this step" : "Evaluate now", `${all}/evaluate`, marks.asked || now.refuses_request, "Asked: the run evaluates at the end of this step, and goes on as if nobody had asked.", null, now.refuses_request) : "",
        now.resumable && !job ? act("Resume", `${all}/resume`, false, "Resumes when its turn comes.", "main") : "",
        now.adapter && now.status === "done" && !job ? act("Evaluate now", `${all}/evaluate`, false, "Scores the saved adapter when its turn comes.") : "",
        now.adapter && now.writes && now.status === "done" ? h("a", { class: "button", href: `#/chat?run=${encodeURIComponent(name)}` }, "Chat") : "",
        unlocked() ? h("button", { type: "button", onclick: () => { notes.hidden = !notes.hidden; if (!notes.hidden) tags.focus(); } }, "Tags and note") : "",
        elsewhere ? h("span", { class: "soft" }, "Started in a terminal: stop it there with Ctrl-C.") : ""));
  }

  async function below() {
    const found = await get(`/api/runs/${encodeURIComponent(name)}`);
    const columns = Object.keys(found.scores);
    const scores = [...new Set(columns.flatMap((when_) => Object.keys(found.scores[when_])))];
    const named = scores.filter((score) => !/_(low|high)(\[|$)/.test(score));
    const scored = (values, score) => {
      const [low, high] = ["low", "high"].map((end) => values[score.replace(/(\[|$)/, `_${end}$1`)]);
      return [number(values[score]), low === undefined || high === undefined ? "" : h("div", { class: "soft" }, `${number(low)} to ${number(high)}`)];
    };
    const played = found.tables.includes("predictions") && found.plays
      ? episodes(await get(`/api/runs/${encodeURIComponent(name)}/tables/predictions`)) : [];
    fill(rest,
      found.members.rows.length ? [h("h2", {}, "Adapters"), adapters(name, found.members, member)] : "",
      named.length && member === null ? [h("h2", {}, "Scores"), table(["score", ...columns.map((name_) => ({ name: name_, right: true }))], named.map((score) => [score, ...columns.map((when_) => scored(found.scores[when_], score))]), { caption: "Scores" })] : "",
      played.length && member === null ? [h("h2", {}, "Episodes"), played] : "",
      found.tasks.length ? [h("h2", {}, "Tasks of lm-eval"), table(["task", "metric", ...["documents", "before", "after", "difference", "low", "high"].map((name_) => ({ name: name_, right: true }))],
        found.tasks.map((each) => [each.task, each.metric, ...["documents", "before", "after", "difference", "low", "high"].map((name_) => number(each[name_]))]), { caption: "Tasks" })] : "",
      found.tables.length ? h("h2", {}, "Tables") : "",
      ...["predictions", ...found.tables.filter((each) => each !== "predictions")].filter((each) => found.tables.includes(each)).map((each) => rows(name, each)),
      found.report ? h("details", { ontoggle: (event) => { if (event.target.open && event.target.children.length === 1) event.target.append(h("iframe", { src: report, sandbox: true, title: `Report of ${name}` })); } },
        h("summary", {}, "Report: plots, pictures and tables")) : "",
      found.commands.length ? [h("h2", {}, "In a terminal"), h("div", { class: "card" }, found.commands.map(copied))] : "",
      h("h2", {}, "Settings"),
      h("details", {}, h("summary", {}, "config.yaml"), h("pre", { class: "card", tabindex: "0" }, found.config)),
      h("details", {}, h("summary", {}, "manifest.json"), h("pre", { class: "card", tabindex: "0" }, JSON.stringify(found.facts, null, 2))));
  }

  async function seen(found) {
    const before = marks;
    marks = found;
    if (before.asked !== marks.asked) head();
    const all = `/api/runs/${encodeURIComponent(name)}`;
    if (before.samples !== marks.samples) samples.show(await get(`${all}/samples`));
    if (before.layers !== marks.layers) layers.show(await get(`${all}/layers`), now.step);
  }

  head();
  await below();
  return {
    element: h("div", {}, top, notes, plots.element, samples.element, layers.element,
      run.curves.length > MOST ? h("p", { class: "soft" }, `${run.curves.length - MOST} more adapters are in the report.`) : "", rest),
    title: name,
    watch: watched(shownCurves.map((curve) => [name, curve])),
    hear(event, data) {
      if (event === "runs") {
        const found = data.find((each) => each.name === name);
        if (!found) return;
        const ended = found.status !== now.status;
        if (found.step !== now.step) layers.reach(found.step);
        now = found;
        head();
        if (ended) below().catch((error) => say(error.message));
      } else if (event === "jobs") { jobs = data; head(); }
      else if (event === "rows") { curves.get(data.curve)?.add(data); plots.soon(); }
      else if (event === "files") seen(data).catch((error) => say(error.message));
      else if (event === "fault") say(data.error);
    },
    shown() { plots.draw(); },
    close() { plots.close(); },
  };
}

// The members of a sweep, search or fleet, or the folds, with their scores; each links to its curves alone.
function adapters(name, { head, rows }, member) {
  return table(head.map((column) => ({ name: column, right: rows.some((row) => typeof row.cells[head.indexOf(column)] === "number") })),
    rows.map(({ curve, shipped, cells }) => cells.map((cell, place) => {
      const text = typeof cell === "number" ? number(cell) : cell === null ? "" : String(cell);
      if (place > 0) return text;
      const link = curve === null || curve === member ? h("strong", {}, text) : h("a", { href: `#/run/${encodeURIComponent(name)}?member=${encodeURIComponent(curve)}` }, text);
      return shipped ? [link, " ", h("span", { class: "tag" }, "saved")] : link;
    })), { caption: "Adapters" });
}

// A table of a run, opened when somebody wants it, 200 rows at a time.
function rows(name, table_) {
  const place = h("div");
  let loaded = false;
  async function load(first) {
    try {
      const found = await get(`/api/runs/${encodeURIComponent(name)}/tables/${encodeURIComponent(table_)}?first=${first}`);
      const last = found.first + found.rows.length;
      const wordy = found.columns.map((column, place_) => ({ name: column, ...(found.rows.some((row) => typeof row[place_] === "string") ? { words: true } : { right: true }) }));
      place.replaceChildren(
        h("div", { class: "row" }, h("span", { class: "soft" }, `Rows ${number(found.first + 1)} to ${number(last)} of ${number(found.of)}`),
          h("button", { type: "button", disabled: found.first === 0, onclick: () => load(Math.max(0, found.first - 200)) }, "Earlier"),
          h("button", { type: "button", disabled: last >= found.of, onclick: () => load(last) }, "Later")),
        table(wordy, found.rows.map((row) => row.map((cell, place_) => wordy[place_].name === "row" && found.pictures[cell] ? [h("span", { class: "thumb" }, h("img", { src: found.pictures[cell], alt: "" })), cell] : (typeof cell === "number" ? number(cell) : cell === null ? "" : String(cell)))), { caption: table_ }));
    } catch (error) { place.replaceChildren(h("p", { class: "bad" }, error.message)); }
  }
  return h("details", { ontoggle: (event) => { if (event.target.open && !loaded) { loaded = true; load(0); } } }, h("summary", {}, table_), place);
}

export async function comparePage(names) {
  const found = await get(`/api/differences?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`);
  const curves = new Map(names.map((name, place) => [name, new Curve(name, place)]));
  const plots = new Plots([...curves.values()]);
  const top = h("div");
  const pairs = h("div", {}, names.length > 1 ? h("p", { class: "soft" }, "Comparing their rows ...") : "");
  if (names.length > 1) {
    get(`/api/paired?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`).then(
      ({ parts = [], error }) => fill(pairs,
        parts.length ? h("h2", {}, "On the same rows") : "",
        error ? h("p", { class: "bad" }, error) : "",
        ...parts.map((part) => (part.head ? table(part.head.map((name, place) => ({ name, right: part.right[place] })), part.rows, { caption: part.table }) : h("p", { class: "soft" }, part.text)))),
      (error) => fill(pairs, h("p", { class: "bad" }, error.message)));
  }
  return {
    element: h("div", {}, h("h1", {}, `${names.length} runs`), top, plots.element, pairs, h("h2", {}, "Settings that differ"),
      found.length ? table(["setting", ...names], found.map(([key, values]) => [key, ...values])) : h("p", {}, "None.")),
    title: "Compare",
    watch: watched(names.map((name) => [name, ""])),
    hear(event, data) {
      if (event === "runs") {
        const chosen = names.map((name) => data.find((run) => run.name === name)).filter(Boolean);
        top.replaceChildren(table([{ name: "run", kind: "name" }, "status", "score", "loss", { name: "tokens a second", right: true }, { name: "memory", right: true }, { name: "time", right: true }],
          chosen.map((run) => [h("a", { href: `#/run/${encodeURIComponent(run.name)}` }, run.name), status(run.status), ...changes(run), count(run.tokens_per_second), bytes(run.peak_bytes), duration(run.elapsed_s)]), { caption: "Runs", stacked: true }));
      } else if (event === "rows") { curves.get(data.run)?.add(data); plots.soon(); }
    },
    shown() { plots.draw(); },
    close() { plots.close(); },
  };
}
