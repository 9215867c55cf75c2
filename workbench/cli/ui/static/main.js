// Which page is shown, and what it hears from the server.

import { chatPage } from "./chat_page.js";
import { h } from "./dom.js";
import { jobsPage, logPage } from "./jobs_page.js";
import { newPage } from "./new_page.js";
import { comparePage, runPage } from "./run_page.js";
import { runsPage } from "./runs_page.js";
import { follow, get, unlock, unlocked } from "./server.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
const trouble = document.getElementById("trouble");
const locked = document.getElementById("locked");
const waiting = document.getElementById("waiting");
let page = null;
let hearing = null;
let turn = 0;

function pageOf(hash) {
  const [path, query] = hash.replace(/^#/, "").split("?");
  const [, name, rest] = path.split("/").map(decodeURIComponent);
  const words = new URLSearchParams(query);
  if (name === "run") return ["runs", () => runPage(rest, words.get("member"))];
  if (name === "compare") return ["runs", () => comparePage(words.getAll("run"))];
  if (name === "new") return ["new", () => newPage(words.get("recipe"))];
  if (name === "log") return ["runs", () => logPage(rest)];
  if (name === "jobs") return ["jobs", () => jobsPage(rest ? Number(rest) : null)];
  if (name === "chat") return ["chat", () => chatPage(words.get("run"))];
  return ["runs", () => runsPage()];
}

async function show() {
  const mine = turn += 1;
  hearing?.abort();
  page?.close?.();
  page = null;
  const [name, make] = pageOf(location.hash);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  const slow = setTimeout(() => main.replaceChildren(h("p", { class: "soft", role: "status" }, "Loading ...")), 200);
  try {
    const found = await make();
    clearTimeout(slow);
    if (mine !== turn) { found.close?.(); return; }
    page = found;
    main.replaceChildren(found.element);
    document.title = `${found.title} - Workbench`;
  } catch (error) {
    clearTimeout(slow);
    if (mine === turn) main.replaceChildren(h("h1", {}, "This cannot be shown"), h("p", { class: "bad" }, error.message));
  }
  if (mine !== turn) return;
  main.focus();
  page?.shown?.();
  hearing = new AbortController();
  follow(`/api/events?${page?.watch ?? ""}`, (event, data) => {
    if (mine !== turn) return;
    if (event === "jobs") {
      const open = data.filter((job) => !["done", "stopped", "failed"].includes(job.state)).length;
      waiting.textContent = open ? `(${open})` : "";
    }
    if (event === "trouble") { trouble.textContent = data; trouble.hidden = !data; }
    page?.hear(event, data);
  }, hearing.signal, (text) => { connection.textContent = text; });
}

function lock() {
  locked.hidden = unlocked();
  const word = h("input", { type: "password", autocomplete: "off", "aria-label": "Token" });
  locked.replaceChildren(h("form", { onsubmit: (event) => { event.preventDefault(); unlock(word.value); lock(); show(); } },
    "Only looking. The address that ", h("code", {}, "workbench ui"), " printed has the token that lets you start and stop runs: ", word, h("button", {}, "Use it")));
}

function begin() {
  const given = /^#token=(.+)$/.exec(location.hash);
  if (given) {
    unlock(decodeURIComponent(given[1]));
    history.replaceState(null, "", "#/");
  }
  lock();
  show();
}

document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
addEventListener("hashchange", () => (location.hash.startsWith("#token=") ? begin() : show()));
get("/api/about").then((about) => { document.querySelector("nav").setAttribute("title", about.folder); }, () => {});
begin();
