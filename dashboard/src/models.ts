// What is served, by which rules, and which sessions are bound?

import { setThresholds } from "./actions.js";
import { get, message } from "./api.js";
import { button, card, el, Keyed, write } from "./dom.js";
import { judged } from "./explain.js";
import { count, digits, percent, span, UNKNOWN } from "./format.js";
import type { ModelRow, State, Thresholds, View } from "./state.js";

interface Session {
  readonly id: string;
  readonly router: string;
  readonly worker: string;
  readonly in_engine: boolean;
  readonly requests: number;
  readonly idle_ms_left: number | null;
}

/** How another policy fares beside the real one. */
interface Shadow {
  readonly model: string;
  readonly policy: string;
  readonly compared: number;
  readonly disagreement: number;
  readonly mean_regret_s: number;
}

/** Columns after the name. */
const COLUMNS = [
  ["Workers", "num"],
  ["Routed by", ""],
  ["Tokens from", ""],
  ["Block size", "num"],
  ["Requests", "num"],
  ["Served", "num"],
  ["Failed / rejected", "num"],
  ["Answer tokens", "num"],
  ["Sessions", "num"],
  ["Busy above", ""],
] as const;

const ASK_MS = 3000;
/** Sessions that are shown. */
const SESSIONS_MAX = 100;

/** When workers count as busy, in words. */
export function thresholdText(thresholds: Thresholds): string {
  const words: string[] = [];
  const { active_decode_blocks_threshold: blocks, active_prefill_tokens_threshold: tokens, active_prefill_tokens_threshold_frac: batches } = thresholds;
  if (blocks !== null) words.push(`${digits(blocks * 100, 3)}% of KV blocks`);
  if (tokens !== null) words.push(`${count(tokens)} prompt tokens`);
  if (batches !== null) words.push(`${digits(batches, 3)} batches of prompt`);
  return words.length === 0 ? "never" : words.join(", ");
}

class Row {
  readonly root: HTMLTableRowElement;
  private readonly cells: HTMLTableCellElement[] = [];
  private row: ModelRow;

  constructor(row: ModelRow, canAct: boolean) {
    this.row = row;
    this.root = el("tr", {}, el("th", { scope: "row" }, row.name));
    for (const [name, kind] of COLUMNS) {
      const cell = el("td", { class: kind, "data-label": name });
      this.cells.push(cell);
      this.root.append(cell);
    }
    if (canAct) this.root.append(el("td", { class: "act" }, button("Thresholds…", () => setThresholds(this.row.name, this.row.thresholds), "quiet")));
  }

  update(row: ModelRow, state: State): void {
    this.row = row;
    const totals = state.traffic(row.name)?.totals;
    const texts = [
      row.prefill_workers > 0 ? `${count(row.workers)} + ${count(row.prefill_workers)} prefill` : count(row.workers),
      row.mode === "kv" ? `${row.mode}, ${row.policy === "time" ? "in seconds" : "in blocks"}` : row.mode,
      row.tokens_from.replaceAll("_", " "),
      count(row.block_size),
      count(totals?.started ?? null),
      count(totals?.succeeded ?? null),
      totals ? `${count(totals.failed)} / ${count(totals.rejected)}` : UNKNOWN,
      count(totals?.output_tokens ?? null),
      count(row.sessions),
      thresholdText(row.thresholds),
    ];
    texts.forEach((text, index) => {
      const cell = this.cells[index];
      if (cell !== undefined) write(cell, text);
    });
  }
}

export class ModelsView implements View {
  readonly root = el("div", { class: "view" });
  private readonly body = el("tbody");
  private readonly sessions = el("tbody");
  /** The table of sessions, where there are any. */
  private readonly bound = el("div", { class: "scroll", hidden: true });
  private readonly note = el("p", { class: "soft" });
  /** What shadow policies would have done, where there are any. */
  private readonly shadows = el("div");
  private readonly shadowCard = card("Shadow policy", this.shadows, el("p", { class: "soft" }, "Another policy decides beside the real one and acts on nothing. What its choices would have cost is an estimate by the time model, in seconds that all requests wait; it is no time to first token."));
  private readonly empty = el("p", { class: "empty" });
  private readonly table: Keyed<Session, { root: HTMLTableRowElement; cells: HTMLTableCellElement[] }>;
  private rows: Keyed<ModelRow, Row> | null = null;
  private state: State | null = null;
  private timer = 0;

  constructor() {
    const head = el("tr", {}, ...[["Model", ""] as const, ...COLUMNS].map(([name, kind]) => el("th", { scope: "col", class: kind }, name)));
    this.root.append(card("Models", el("div", { class: "scroll" }, el("table", { class: "rows served" }, el("caption", { class: "hidden" }, "Models"), el("thead", {}, head), this.body)), this.empty));
    const names = ["Session", "Goes to", "Held by", "Ends in"];
    const shead = el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)));
    this.bound.append(el("table", { class: "rows" }, el("caption", { class: "hidden" }, "Sessions"), el("thead", {}, shead), this.sessions));
    this.root.append(card("Sessions", this.note, this.bound));
    this.shadowCard.hidden = true;
    this.root.append(this.shadowCard);
    this.table = new Keyed(
      this.sessions,
      () => {
        const cells = [el("th", { scope: "row" }), el("td"), el("td"), el("td")];
        return { root: el("tr", {}, ...cells), cells };
      },
      ({ cells }, session) => {
        const held = session.requests > 0 ? `${session.requests} requests` : session.in_engine ? "its engine, too" : "nobody now";
        const ends = session.idle_ms_left === null ? "while requests run: never" : span(session.idle_ms_left);
        const texts = [session.id, this.state?.nameOf(session.worker) ?? session.worker, held, ends];
        texts.forEach((text, index) => {
          const cell = cells[index];
          if (cell !== undefined) write(cell, text);
        });
      },
    );
    void this.ask();
  }

  update(state: State): void {
    this.state = state;
    this.rows ??= new Keyed(this.body, (row) => new Row(row, state.canAct), (made, row) => this.state && made.update(row, this.state));
    const ours = state.models.filter((row) => state.scope === "" || row.name === state.scope);
    this.rows.show(ours.map((row) => [row.name, row]));
    this.empty.hidden = ours.length > 0;
    write(this.empty, ours.length > 0 ? "" : "No model is served yet: the first worker that answers brings its own.");
  }

  leave(): void {
    window.clearTimeout(this.timer);
  }

  private async ask(): Promise<void> {
    try {
      const told = await get<{ total: number; sessions: readonly Session[] }>("/sessions");
      const shown = told.sessions.slice(0, SESSIONS_MAX);
      this.table.show(shown.map((session) => [`${session.router} ${session.id}`, session]));
      this.bound.hidden = shown.length === 0;
      const more = told.total - shown.length;
      write(this.note, told.total === 0 ? "No session is bound. Requests with nvext.session_control, or the session header where --router-session-affinity-ttl-secs is set, bind one." : more > 0 ? `${count(told.total)} are bound; ${count(more)} are not shown.` : `${count(told.total)} are bound.`);
      await this.askShadows();
    } catch (error) {
      write(this.note, message(error));
    }
    this.timer = window.setTimeout(() => this.root.isConnected && void this.ask(), ASK_MS);
  }

  private async askShadows(): Promise<void> {
    const { shadows } = await get<{ shadows: readonly Shadow[] }>("/shadow");
    this.shadowCard.hidden = shadows.length === 0;
    const line = (row: Shadow) => `${row.policy} beside ${row.model}: ${percent(row.disagreement)} of ${count(row.compared)} placements elsewhere, ${judged(row.mean_regret_s)} each on average by the time model`;
    this.shadows.replaceChildren(...shadows.map((row) => el("p", {}, line(row))));
  }
}
