// Is the fleet well, how does traffic go, and where do requests go? The first view.

import { Chart } from "./charts.js";
import { DecisionTable } from "./decisions.js";
import { card, el, Keyed, write } from "./dom.js";
import { count, percent, rate, time, UNKNOWN, workerName } from "./format.js";
import type { DecisionRow, RankRow, State, View } from "./state.js";

/** Workers of the picture; the busiest where there are more. */
const WORKERS_MAX = 12;
const LATEST = 8;

class Tile {
  readonly root: HTMLElement;
  private readonly value = el("dd");
  private readonly about = el("dd", { class: "soft" });

  constructor(name: string) {
    this.root = el("div", { class: "tile" }, el("dt", {}, name), this.value, this.about);
  }

  set(value: string, about: string, tone = ""): void {
    write(this.value, value);
    write(this.about, about);
    this.value.className = tone;
  }
}

/** Where the latest requests went: a bar for each worker. */
class ShareRow {
  readonly root: HTMLElement;
  private readonly name = el("th", { scope: "row" });
  private readonly bar = el("span", { class: "share" });
  private readonly figure = el("td", { class: "num" });
  private readonly cached = el("td", { class: "num" });
  private readonly running = el("td", { class: "num" });

  constructor() {
    this.root = el("tr", {}, this.name, el("td", { class: "wide" }, this.bar), this.figure, this.cached, this.running);
  }

  set(row: RankRow, share: number, widest: number, cached: string): void {
    write(this.name, workerName(`${row.worker}/${row.rank}`, row.url));
    this.bar.style.width = `${widest > 0 ? (share / widest) * 100 : 0}%`;
    write(this.figure, percent(share));
    write(this.cached, cached);
    write(this.running, count(row.requests));
  }
}

export class OverviewView implements View {
  readonly root = el("div", { class: "view" });
  private readonly tiles = {
    requests: new Tile("Requests"),
    ttft: new Tile("First token, p95"),
    itl: new Tile("Between tokens, p95"),
    hits: new Tile("Prompt found cached"),
    errors: new Tile("Not served"),
    queue: new Tile("Under way"),
    fleet: new Tile("Workers"),
  };
  private readonly charts = [
    new Chart("Requests per second", [{ name: "served", column: "succeeded", look: "a" }, { name: "failed", column: "failed", look: "b" }, { name: "rejected", column: "rejected", look: "c" }, { name: "left", column: "cancelled", look: "d" }], rate, 2),
    new Chart("Time to first token", [{ name: "p50", column: "ttft_p50", look: "a" }, { name: "p95", column: "ttft_p95", look: "b" }, { name: "p99", column: "ttft_p99", look: "c" }], (value) => time(value), 0.01),
    new Chart("Time between tokens", [{ name: "p50", column: "itl_p50", look: "a" }, { name: "p95", column: "itl_p95", look: "b" }, { name: "p99", column: "itl_p99", look: "c" }], (value) => time(value), 0.01),
    new Chart("Prompt tokens from cache", [{ name: "predicted", column: "predicted", look: "a" }, { name: "reported by engines", column: "reported", look: "b" }], percent, 1, true),
    new Chart("Requests under way", [{ name: "running", column: "active", look: "a" }, { name: "without a token yet", column: "waiting", look: "b" }, { name: "held by the router", column: "held", look: "c" }], count, 2),
    new Chart("Answer tokens per second", [{ name: "tokens", column: "output_tokens", look: "a" }], rate, 2),
  ];
  private readonly shares: Keyed<[RankRow, number, number, string], ShareRow>;
  private readonly shareNote = el("p", { class: "soft" });
  private readonly latest: DecisionTable;

  constructor(show: (id: string) => void) {
    this.latest = new DecisionTable(show, () => null);
    const tiles = el("dl", { class: "tiles" }, ...Object.values(this.tiles).map((tile) => tile.root));
    const body = el("tbody");
    this.shares = new Keyed(body, () => new ShareRow(), (made, [row, share, widest, cached]) => made.set(row, share, widest, cached));
    const head = el("tr", {}, el("th", { scope: "col" }, "Worker"), el("th", { scope: "col" }, "Decisions"), el("th", { scope: "col", class: "num" }, "Share"), el("th", { scope: "col", class: "num" }, "Found cached"), el("th", { scope: "col", class: "num" }, "Running"));
    const where = el("table", { class: "rows shares" }, el("caption", { class: "hidden" }, "Where the latest requests went"), el("thead", {}, head), body);
    this.root.append(
      el("h1", { class: "hidden" }, "Overview"),
      tiles,
      el("div", { class: "duo" }, card("Where requests go", el("div", { class: "scroll" }, where), this.shareNote), card("Latest decisions", el("p", { class: "soft" }, "Each request goes where the least uncached prompt work plus decode load awaits. Open one to see every candidate’s cost."), this.latest.root)),
      el("div", { class: "charts" }, ...this.charts.map((chart) => chart.root)),
    );
  }

  update(state: State): void {
    this.updateTiles(state);
    for (const chart of this.charts) chart.update(state);
    const ours = state.decisions.filter((row) => state.scope === "" || row.model === state.scope);
    this.updateShares(state, ours);
    this.latest.update(state, ours.slice(0, LATEST), "No decision yet: send a request, and it is here within a second.");
  }

  private updateTiles(state: State): void {
    const totals = state.traffic()?.totals;
    const { tiles } = this;
    tiles.requests.set(`${rate(state.minute("requests"))}/s`, totals ? `${count(totals.started)} since the start` : "");
    tiles.ttft.set(time(state.minute("ttft_p95")), `p50 ${time(state.minute("ttft_p50"), 2)} · p99 ${time(state.minute("ttft_p99"), 2)}`);
    tiles.itl.set(time(state.minute("itl_p95")), `p50 ${time(state.minute("itl_p50"), 2)} · p99 ${time(state.minute("itl_p99"), 2)}`);
    tiles.hits.set(percent(state.minute("reported")), `${percent(state.minute("predicted"))} predicted`);
    const bad = (state.minute("failed") ?? 0) + (state.minute("rejected") ?? 0);
    tiles.errors.set(`${rate(bad)}/s`, totals ? `${count(totals.failed)} failed, ${count(totals.rejected)} rejected` : "", bad > 0 ? "bad" : "");
    tiles.queue.set(count(totals?.active), totals ? `${count(totals.waiting)} without a token yet` : "");
    const ranks = state.ranks();
    const workers = new Set(ranks.map((row) => row.worker)).size;
    const unwell = new Set(ranks.filter((row) => row.state !== "serving" && row.state !== "busy").map((row) => row.worker)).size;
    tiles.fleet.set(count(workers), unwell === 0 ? (workers === 0 ? "none yet" : "all serving") : `${unwell} not serving`, unwell > 0 ? "warn" : "");
  }

  private updateShares(state: State, ours: readonly DecisionRow[]): void {
    const won = new Map<string, number>();
    let all = 0;
    for (const row of ours) {
      if (row.worker === null) continue;
      all += 1;
      won.set(row.worker, (won.get(row.worker) ?? 0) + 1);
    }
    const shareOf = (row: RankRow) => (all === 0 ? 0 : (won.get(`${row.worker}/${row.rank}`) ?? 0) / all);
    const ranks = state.ranks().filter((row) => row.models.length > 0);
    const byShare = [...ranks].sort((one, other) => shareOf(other) - shareOf(one) || other.requests - one.requests);
    const some = ranks.length > WORKERS_MAX && all > 0 ? byShare.filter((row) => shareOf(row) > 0) : byShare;
    const shown = some.slice(0, WORKERS_MAX).sort((one, other) => one.key.localeCompare(other.key, "en", { numeric: true }));
    const widest = Math.max(...shown.map(shareOf), 0);
    this.shares.show(shown.map((row) => [row.key, [row, shareOf(row), widest, row.hits[1] > 0 ? percent(row.hits[3] / row.hits[1]) : UNKNOWN]]));
    const more = ranks.length - shown.length;
    const about = ranks.length === 0 ? "No worker serves yet." : all === 0 ? "No request yet." : `Of the latest ${all} decisions.`;
    write(this.shareNote, more > 0 ? `${about} ${shown.length === some.length ? `The ${count(more)} others got none` : `The ${shown.length} that got most`}; all are in Fleet.` : about);
  }
}
