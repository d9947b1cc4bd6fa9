// How is each rank: what does it do, how full is it, how well is its cache known?

import { addWorker, removeWorker } from "./actions.js";
import { button, card, el, Keyed, mark, Meter, write } from "./dom.js";
import { count, milliseconds, percent, UNKNOWN } from "./format.js";
import { rankName, type RankRow, type State, type View } from "./state.js";

type Sort = "worker" | "state" | "requests" | "prefill" | "decode" | "hit" | "lag";

const COLUMNS: readonly (readonly [Sort | null, string, string])[] = [
  ["worker", "Worker", ""],
  ["state", "State", ""],
  ["requests", "Requests", "num"],
  ["prefill", "Prompt tokens waiting", "num"],
  ["decode", "KV blocks in use", "num"],
  [null, "Cache view", ""],
  ["lag", "Event lag", "num"],
  ["hit", "Cached, predicted / found", "num"],
];

const BAD = new Set(["down", "unreachable", "unhealthy"]);
const WARN = new Set(["busy", "draining", "joining"]);

function tone(state: string): string {
  return BAD.has(state) ? "bad" : WARN.has(state) ? "warn" : "ok";
}

/** How well a cache is known, in words. */
export function cacheText(row: RankRow): string {
  const { cache } = row;
  if (cache === null) return row.models.length === 0 ? UNKNOWN : "exact (in this process)";
  const cause = cache.cause === null ? "" : `: ${cache.cause.replaceAll("_", " ")}`;
  return `${cache.state}${cause}`;
}

function share(part: number, whole: number | null): number | null {
  return whole === null || whole <= 0 ? null : part / whole;
}

function reported(row: RankRow): number {
  return row.hits[1] > 0 ? row.hits[3] / row.hits[1] : -1;
}

class Row {
  readonly root: HTMLTableRowElement;
  private readonly name = el("strong");
  private readonly models = el("span", { class: "soft models" });
  private readonly state = el("td", { class: "tone" });
  private readonly requests = el("td", { class: "num" });
  private readonly prefill = new Meter();
  private readonly decode = new Meter();
  private readonly cache = el("td");
  private readonly lag = el("td", { class: "num" });
  private readonly hit = el("td", { class: "num" });
  private row: RankRow;

  constructor(row: RankRow, canAct: boolean) {
    this.row = row;
    const cells = [this.state, this.requests, el("td", { class: "num" }, this.prefill.root), el("td", { class: "num" }, this.decode.root), this.cache, this.lag, this.hit];
    const labels = ["State", "Requests", "Prompt tokens waiting", "KV blocks in use", "Cache view", "Event lag", "Cached, predicted / found"];
    cells.forEach((cell, index) => cell.setAttribute("data-label", labels[index] ?? ""));
    this.root = el("tr", {}, el("th", { scope: "row" }, this.name, this.models), ...cells);
    if (canAct) this.root.append(el("td", { class: "act" }, row.removable ? button("Remove…", () => removeWorker(this.row), "quiet") : ""));
  }

  update(row: RankRow): void {
    this.row = row;
    write(this.name, rankName(row));
    mark(this.name, "title", `worker ${row.worker}`);
    write(this.models, [...row.models, ...(row.role === "aggregated" ? [] : [`${row.role} worker`])].join(", "));
    write(this.state, row.state);
    mark(this.state, "class", `tone ${tone(row.state)}`);
    write(this.requests, count(row.requests));
    this.prefill.set(count(row.prefill_tokens), share(row.prefill_tokens, row.batch_tokens === null ? null : row.batch_tokens * 4));
    const full = share(row.decode_blocks, row.kv_blocks);
    this.decode.set(row.kv_blocks === null ? count(row.decode_blocks) : `${count(row.decode_blocks)} of ${count(row.kv_blocks)}`, full);
    write(this.cache, cacheText(row));
    const fault = row.cache?.last_fault ?? row.cache?.advice ?? null;
    mark(this.cache, "title", fault);
    write(this.lag, row.cache === null || row.cache.connected === null ? UNKNOWN : row.cache.connected ? milliseconds(row.cache.lag_ms) : "not connected");
    const [answers, prompt, said, found] = row.hits;
    write(this.hit, answers === 0 ? UNKNOWN : `${percent(said / prompt)} / ${percent(found / prompt)}`);
  }
}

export class FleetView implements View {
  readonly root = el("div", { class: "view" });
  private readonly filter = el("input", { type: "search", placeholder: "address, id or state", "aria-label": "Only workers with this text" });
  private readonly note = el("p", { class: "soft", role: "status" });
  private readonly heads = new Map<Sort, HTMLTableCellElement>();
  private readonly body = el("tbody");
  private readonly empty = el("p", { class: "empty" });
  private readonly tools: HTMLElement;
  private rows: Keyed<RankRow, Row> | null = null;
  private sort: Sort = "worker";
  private down = false;
  private state: State | null = null;

  constructor() {
    const head = el("tr");
    for (const [sort, name, kind] of COLUMNS) {
      const cell = el("th", { scope: "col", class: kind });
      if (sort === null) cell.append(name);
      else {
        cell.append(button(name, () => this.sortBy(sort), "linklike"));
        this.heads.set(sort, cell);
      }
      head.append(cell);
    }
    this.filter.addEventListener("input", () => this.state && this.update(this.state));
    this.tools = el("div", { class: "toolbar" }, this.filter, this.note);
    const table = el("table", { class: "rows fleet" }, el("caption", { class: "hidden" }, "Ranks of the fleet"), el("thead", {}, head), this.body);
    this.root.append(card("Fleet", this.tools, el("div", { class: "scroll" }, table), this.empty));
  }

  update(state: State): void {
    if (this.rows === null) {
      if (state.canAct) this.tools.append(button("Add a worker…", addWorker, "quiet"));
      this.rows = new Keyed(this.body, (row) => new Row(row, state.canAct), (made, row) => made.update(row));
    }
    this.state = state;
    const word = this.filter.value.trim().toLowerCase();
    const has = (row: RankRow) => [row.url ?? "", row.address ?? "", row.worker, row.role, row.state, ...row.models].some((text) => text.toLowerCase().includes(word));
    const all = state.ranks();
    const ours = word === "" ? all : all.filter(has);
    ours.sort((one, other) => (this.down ? -1 : 1) * this.order(one, other));
    this.rows.show(ours.map((row) => [row.key, row]));
    for (const [sort, cell] of this.heads) mark(cell, "aria-sort", sort === this.sort ? (this.down ? "descending" : "ascending") : null);
    const unwell = all.filter((row) => BAD.has(row.state)).length;
    const left = state.leftOut > 0 ? `; ${count(state.leftOut)} more are not shown` : "";
    const acting = state.canAct ? "" : "; to add and remove here, start Kvasir with an admin token";
    write(this.note, `${count(ours.length)} of ${count(all.length)} ranks${unwell > 0 ? `, ${unwell} unwell` : ""}${left}${acting}`);
    write(this.empty, all.length === 0 ? "No worker yet. Start engines and name them with --worker, a workers file, or kvasir workers add URL." : ours.length === 0 ? "No worker fits the filter." : "");
    this.empty.hidden = ours.length > 0;
  }

  private sortBy(sort: Sort): void {
    this.down = this.sort === sort ? !this.down : sort !== "worker" && sort !== "state";
    this.sort = sort;
    if (this.state !== null) this.update(this.state);
  }

  private order(one: RankRow, other: RankRow): number {
    const by = (of: (row: RankRow) => number) => of(one) - of(other);
    const names = rankName(one).localeCompare(rankName(other), "en", { numeric: true }) || one.rank - other.rank;
    switch (this.sort) {
      case "requests":
        return by((row) => row.requests) || names;
      case "prefill":
        return by((row) => row.prefill_tokens) || names;
      case "decode":
        return by((row) => share(row.decode_blocks, row.kv_blocks) ?? row.decode_blocks) || names;
      case "hit":
        return by(reported) || names;
      case "lag":
        return by((row) => row.cache?.lag_ms ?? -1) || names;
      case "state":
        return one.state.localeCompare(other.state) || names;
      default:
        return names;
    }
  }
}
