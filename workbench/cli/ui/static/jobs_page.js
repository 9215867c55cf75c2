// What runs, what waits, and what it prints.

import { fill, h, say, status, table } from "./dom.js";
import { post, unlocked } from "./server.js";
import { duration, when } from "./units.js";

const OVER = ["done", "stopped", "failed"];

// Lines that come while somebody reads: the end stays in view for who is there.
function logged() {
  const element = h("pre", { class: "card", tabindex: "0", role: "log", "aria-label": "Log" });
  return {
    element,
    hear(data) {
      const atEnd = element.scrollHeight - element.scrollTop - element.clientHeight < 40;
      element.textContent = data.goes_on ? element.textContent + data.text : data.text;
      if (atEnd) element.scrollTop = element.scrollHeight;
    },
  };
}

export function logPage(name) {
  const log = logged();
  return {
    element: h("div", {}, h("h1", {}, "Log of ", h("a", { href: `#/run/${encodeURIComponent(name)}` }, name)), log.element),
    title: `Log of ${name}`,
    watch: `run=${encodeURIComponent(name)}`,
    hear(event, data) { if (event === "log") log.hear(data); },
  };
}

export function jobsPage(number) {
  const place = h("div");
  const log = logged();
  let jobs = [];

  function took(job) {
    if (!job.began) return "";
    return duration(((job.ended ?? Date.now() / 1000)) - job.began);
  }

  function line(job) {
    const stop = OVER.includes(job.state) ? "" : h("button", { type: "button", disabled: !unlocked() || job.state === "stopping",
      onclick: () => post(`/api/jobs/${job.number}/stop`).then(() => say("Asked to stop: it saves a checkpoint first."), (error) => say(error.message)) },
    job.state === "waiting" ? "Take out" : "Stop and save");
    return [h("a", { href: `#/jobs/${job.number}` }, `${job.number}`), job.verb, h("a", { href: `#/run/${encodeURIComponent(job.run)}` }, job.run), status(job.state),
      job.began ? when(job.began * 1000) : "", took(job), stop];
  }

  function show() {
    const job = jobs.find((each) => each.number === number);
    fill(place,
      jobs.length ? table(["job", "does", { name: "run", kind: "name" }, "state", "began", { name: "took", right: true }, ""], [...jobs].reverse().map(line), { stacked: true, caption: "Jobs" })
        : h("p", {}, "Nothing waits. ", h("a", { href: "#/new" }, "Start a run"), "."),
      job ? h("h2", {}, `What job ${number} prints`) : "",
      job ? h("p", {}, h("code", {}, `workbench ${job.words.join(" ")}`)) : "");
  }

  show();
  return {
    element: h("div", {}, h("h1", {}, "Queue"), h("p", { class: "soft" }, "One at a time, in the order in which they came, so that no two fight for a device. They go on when the server ends."), place, number === null ? "" : log.element),
    title: "Queue",
    watch: number === null ? "" : `log=${number}`,
    hear(event, data) {
      if (event === "jobs") { jobs = data; show(); }
      else if (event === "log") log.hear(data);
    },
  };
}
