// What is set, and who set it? As `kvasir config show` says it: secrets are hidden by the server.

import { get, message } from "./api.js";
import { card, el, write } from "./dom.js";
import type { View } from "./state.js";

interface Setting {
  readonly value: unknown;
  readonly origin: string;
  readonly default?: unknown;
  readonly from?: string;
}

interface Settings {
  readonly command?: string;
  readonly options?: Readonly<Record<string, Setting>>;
}

export function valueText(value: unknown): string {
  if (value === null || value === undefined) return "none";
  if (Array.isArray(value)) return value.length === 0 ? "none" : value.map(String).join(", ");
  return String(value);
}

export class SettingsView implements View {
  readonly root = el("div", { class: "view" });
  private readonly search = el("input", { type: "search", placeholder: "part of a name or value", "aria-label": "Only settings with this text" });
  private readonly changed = el("input", { type: "checkbox", id: "changed" });
  private readonly note = el("p", { class: "soft", role: "status" }, "Loading.");
  private readonly body = el("tbody");
  private settings: Settings | null = null;

  constructor() {
    this.search.addEventListener("input", () => this.show());
    this.changed.addEventListener("change", () => this.show());
    const head = el("tr", {}, el("th", { scope: "col" }, "Option"), el("th", { scope: "col" }, "Value"), el("th", { scope: "col" }, "Set by"));
    const tools = el("div", { class: "toolbar" }, this.search, el("label", { for: "changed" }, this.changed, " only what somebody set"), this.note);
    this.root.append(card("Settings", tools, el("div", { class: "scroll" }, el("table", { class: "rows settings" }, el("caption", { class: "hidden" }, "Settings"), el("thead", {}, head), this.body))));
    void this.load();
  }

  update(): void {
    // Settings do not change while the server runs.
  }

  private async load(): Promise<void> {
    try {
      this.settings = await get<Settings>("/settings");
      this.changed.checked = Object.values(this.settings.options ?? {}).some((setting) => setting.origin !== "default");
      this.show();
    } catch (error) {
      write(this.note, message(error));
    }
  }

  private show(): void {
    const options = Object.entries(this.settings?.options ?? {});
    const word = this.search.value.trim().toLowerCase();
    const ours = options.filter(([name, setting]) => {
      const told = `${name} ${valueText(setting.value)}`.toLowerCase();
      return told.includes(word) && (!this.changed.checked || setting.origin !== "default");
    });
    this.body.replaceChildren(
      ...ours.map(([name, setting]) => {
        const own = setting.origin !== "default";
        const before = own && setting.default !== undefined ? el("span", { class: "soft" }, ` default ${valueText(setting.default)}`) : null;
        return el("tr", { class: own ? "own" : "" }, el("th", { scope: "row" }, name), el("td", {}, valueText(setting.value), before), el("td", {}, setting.from ?? setting.origin));
      }),
    );
    write(this.note, options.length === 0 ? "This server does not say what it is set to." : `${ours.length} of ${options.length} options of kvasir ${this.settings?.command ?? ""}`);
  }
}
