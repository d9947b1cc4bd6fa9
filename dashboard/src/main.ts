// What is shown? The view that the address names, kept up to date by the stream.

import { askToken, closeDialog } from "./actions.js";
import { DecisionsView } from "./decisions.js";
import { byId, el, mark, write } from "./dom.js";
import { FleetView } from "./fleet.js";
import { span } from "./format.js";
import { ModelsView } from "./models.js";
import { OverviewView } from "./overview.js";
import { SettingsView } from "./settings.js";
import { State, type View } from "./state.js";
import { Stream } from "./stream.js";
import { WhatIfView } from "./what_if.js";

const VIEWS: readonly (readonly [string, string, (rest: string) => View])[] = [
  ["overview", "Overview", () => new OverviewView(showDecision)],
  ["fleet", "Fleet", () => new FleetView()],
  ["decisions", "Decisions", (rest) => new DecisionsView(rest === "" ? null : rest)],
  ["models", "Models", () => new ModelsView()],
  ["what-if", "What if", () => new WhatIfView(showDecision)],
  ["settings", "Settings", () => new SettingsView()],
];

const THEMES = ["auto", "light", "dark"] as const;

const state = new State();
const main = byId("main", HTMLElement);
const link = byId("link", HTMLElement);
const notice = byId("notice", HTMLElement);
const scope = byId("scope", HTMLSelectElement);
let view: View | null = null;
let drawn = false;
/** Why nothing new comes; empty while events come. */
let silent = "";

function showDecision(id: string): void {
  location.hash = `decisions/${encodeURIComponent(id)}`;
}

function navigate(): void {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const found = VIEWS.find(([id]) => id === name) ?? VIEWS[0];
  if (found === undefined) return;
  for (const entry of document.querySelectorAll("#nav a")) {
    const current = entry.getAttribute("href") === `#${found[0]}`;
    mark(entry, "aria-current", current ? "page" : null);
    // On a phone the list of views is wider than the window.
    if (current) entry.scrollIntoView({ block: "nearest", inline: "center" });
  }
  document.title = `${found[1]} – Kvasir`;
  view?.leave?.();
  view = null;
  if (!state.ready) return;
  view = found[2](decodeURIComponent(rest.join("/")));
  if (view.root.querySelector("h1") === null) view.root.prepend(el("h1", { class: "hidden" }, found[1]));
  main.replaceChildren(view.root);
  view.update(state);
}

/** Draws at most once a frame, and not while nobody looks. */
function draw(): void {
  if (drawn) return;
  drawn = true;
  requestAnimationFrame(() => {
    drawn = false;
    fillScope();
    write(byId("version", HTMLElement), `${state.version}, up ${span(state.at - state.started)}`);
    tell();
    if (view === null) navigate();
    else view.update(state);
  });
}

/** What is to be known before anything else on the page. */
function tell(): void {
  const leaving = state.draining ? "The server is about to end: it serves what it has and takes nothing new." : "";
  const text = silent === "" ? leaving : `The server does not answer (${silent})${state.ready ? "; what is shown is from before" : ""}. Trying again.`;
  write(notice, text);
  notice.hidden = text === "";
}

function fillScope(): void {
  const names = state.models.map((model) => model.name);
  const want = names.join("\n");
  if (scope.dataset.for === want) return;
  scope.dataset.for = want;
  const kept = state.scope;
  scope.replaceChildren(el("option", { value: "" }, "all models"));
  for (const name of names) scope.append(el("option", { value: name }, name));
  state.scope = names.includes(kept) ? kept : "";
  scope.value = state.scope;
}

function setTheme(theme: string): void {
  mark(document.documentElement, "data-theme", theme === "auto" ? null : theme);
  write(byId("theme", HTMLElement), `Theme: ${theme}`);
  try {
    localStorage.setItem("kvasir-theme", theme);
  } catch {
    // It is chosen again next time.
  }
}

function savedTheme(): string {
  try {
    return localStorage.getItem("kvasir-theme") ?? "auto";
  } catch {
    return "auto";
  }
}

const stream = new Stream({
  hello: (told) => {
    state.hello(told);
    draw();
  },
  tick: (told) => {
    state.tick(told);
    draw();
  },
  link: (now, about) => {
    write(link, now === "live" ? "live" : now === "locked" ? "locked" : "reconnecting");
    mark(link, "data-state", now);
    mark(link, "title", about === "" ? null : about);
    silent = now === "connecting" ? about : "";
    tell();
    if (now === "locked") {
      main.replaceChildren(el("p", { class: "empty" }, "This dashboard is locked with the admin token."));
      view = null;
      // Without a token there is nothing to say but that one is needed.
      const why = about.startsWith("The admin token is needed") ? "This page shows nothing without the token that the server was started with." : about;
      askToken(why, () => stream.open());
    }
  },
});

for (const [id, title] of VIEWS) byId("nav", HTMLUListElement).append(el("li", {}, el("a", { href: `#${id}` }, title)));
scope.addEventListener("change", () => {
  state.scope = scope.value;
  navigate();
});
byId("theme", HTMLElement).addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "auto";
  const next = THEMES[(THEMES.findIndex((theme) => theme === now) + 1) % THEMES.length];
  setTheme(next ?? "auto");
});
window.addEventListener("hashchange", () => {
  navigate();
  // A view that has given the focus to one of its parts keeps it.
  if (!main.contains(document.activeElement)) main.focus({ preventScroll: true });
});
window.addEventListener("resize", draw);
// The address names the view: the link to its content must not change it.
document.querySelector(".skip")?.addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
byId("dialog", HTMLDialogElement).addEventListener("click", (event) => {
  if (event.target === event.currentTarget) closeDialog();
});
setTheme(savedTheme());
navigate();
stream.open();
