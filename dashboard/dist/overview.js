// Is the fleet well, how does traffic go, and where do requests go? The first view.
import { Chart } from "./charts.js";
import { DecisionTable, whyText } from "./decisions.js";
import { card, el, Keyed, write } from "./dom.js";
import { count, percent, rate, time, UNKNOWN } from "./format.js";
import { rankName } from "./state.js";
/** Workers of the picture; the busiest where there are more. */
const WORKERS_MAX = 12;
const LATEST = 8;
/** Reasons that are shown. */
const REASONS_MAX = 5;
const WORKERLESS = "No worker serves yet. Name engines with --worker URL or a workers file, or add one: kvasir workers add URL. What keeps one from being used: kvasir doctor.";
class Tile {
    root;
    value = el("dd");
    about = el("dd", { class: "soft" });
    constructor(name) {
        this.root = el("div", { class: "tile" }, el("dt", {}, name), this.value, this.about);
    }
    set(value, about, tone = "") {
        write(this.value, value);
        write(this.about, about);
        this.value.className = tone;
    }
}
/** Where the latest requests went: a bar for each worker. */
class ShareRow {
    root;
    name = el("th", { scope: "row" });
    bar = el("span", { class: "share" });
    figure = el("td", { class: "num" });
    cached = el("td", { class: "num" });
    running = el("td", { class: "num" });
    constructor() {
        this.root = el("tr", {}, this.name, el("td", { class: "wide" }, this.bar), this.figure, this.cached, this.running);
    }
    set(row, share, widest, cached) {
        write(this.name, rankName(row) + (row.role === "aggregated" ? "" : ` (${row.role})`));
        this.bar.style.width = `${widest > 0 ? (share / widest) * 100 : 0}%`;
        write(this.figure, percent(share));
        write(this.cached, cached);
        write(this.running, count(row.requests));
    }
}
/** How often a reason decided. */
class ReasonRow {
    root;
    name = el("th", { scope: "row" });
    bar = el("span", { class: "share reason" });
    figure = el("td", { class: "num" });
    constructor() {
        this.root = el("tr", {}, this.name, el("td", { class: "wide" }, this.bar), this.figure);
    }
    set(name, share, widest) {
        write(this.name, name);
        this.bar.style.width = `${widest > 0 ? (share / widest) * 100 : 0}%`;
        write(this.figure, percent(share));
    }
}
export class OverviewView {
    root = el("div", { class: "view" });
    tiles = {
        requests: new Tile("Requests"),
        ttft: new Tile("First token, p95"),
        itl: new Tile("Between tokens, p95"),
        hits: new Tile("Prompt found cached"),
        errors: new Tile("Not served"),
        queue: new Tile("Under way"),
        fleet: new Tile("Workers"),
    };
    charts = [
        new Chart("Requests per second", [{ name: "served", column: "succeeded", look: "a" }, { name: "failed", column: "failed", look: "b" }, { name: "rejected", column: "rejected", look: "c" }, { name: "left", column: "cancelled", look: "d" }], rate, 2),
        new Chart("Time to first token", [{ name: "p50", column: "ttft_p50", look: "a" }, { name: "p95", column: "ttft_p95", look: "b" }, { name: "p99", column: "ttft_p99", look: "c" }], (value) => time(value), 0.01),
        new Chart("Time between tokens", [{ name: "p50", column: "itl_p50", look: "a" }, { name: "p95", column: "itl_p95", look: "b" }, { name: "p99", column: "itl_p99", look: "c" }], (value) => time(value), 0.01),
        new Chart("Prompt tokens from cache", [{ name: "predicted", column: "predicted", look: "a" }, { name: "reported by engines", column: "reported", look: "b" }], percent, 1, true),
        new Chart("Requests under way", [{ name: "running", column: "active", look: "a" }, { name: "without a token yet", column: "waiting", look: "b" }, { name: "held by the router", column: "held", look: "c" }], count, 2),
        new Chart("Answer tokens per second", [{ name: "tokens", column: "output_tokens", look: "a" }], rate, 2),
    ];
    shares;
    reasons;
    shareNote = el("p", { class: "soft" });
    where = el("div", { class: "scroll" });
    why = el("div", { class: "scroll" });
    latest;
    constructor(show) {
        this.latest = new DecisionTable(show, () => null);
        const tiles = el("dl", { class: "tiles" }, ...Object.values(this.tiles).map((tile) => tile.root));
        const body = el("tbody");
        this.shares = new Keyed(body, () => new ShareRow(), (made, [row, share, widest, cached]) => made.set(row, share, widest, cached));
        const head = el("tr", {}, el("th", { scope: "col" }, "Worker"), el("th", { scope: "col" }, "Decisions"), el("th", { scope: "col", class: "num" }, "Share"), el("th", { scope: "col", class: "num" }, "Found cached"), el("th", { scope: "col", class: "num" }, "Running"));
        this.where.append(el("table", { class: "rows shares" }, el("caption", { class: "hidden" }, "Where the latest requests went"), el("thead", {}, head), body));
        const told = el("tbody");
        this.reasons = new Keyed(told, () => new ReasonRow(), (made, [name, share, widest]) => made.set(name, share, widest));
        const tops = el("tr", {}, el("th", { scope: "col" }, "Why there"), el("th", { scope: "col" }, "Decisions"), el("th", { scope: "col", class: "num" }, "Share"));
        this.why.append(el("table", { class: "rows shares reasons" }, el("caption", { class: "hidden" }, "Why the latest requests went there"), el("thead", {}, tops), told));
        this.root.append(el("h1", { class: "hidden" }, "Overview"), tiles, el("div", { class: "duo" }, card("Where requests go, and why", this.where, this.why, this.shareNote), card("Latest decisions", el("p", { class: "soft" }, "Each request goes to the worker with the lowest cost: the part of its prompt that is not cached there, plus the work already there. Open one to see what every worker would have cost."), this.latest.root)), el("div", { class: "charts" }, ...this.charts.map((chart) => chart.root)));
    }
    update(state) {
        this.updateTiles(state);
        for (const chart of this.charts)
            chart.update(state);
        const ours = state.decisions.filter((row) => state.scope === "" || row.model === state.scope);
        this.updateShares(state, ours);
        this.latest.update(state, ours.slice(0, LATEST), state.models.length === 0 ? "No model is served yet." : "No decision yet: send a request, and it is here within a second.");
    }
    updateTiles(state) {
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
    updateShares(state, ours) {
        const won = new Map();
        const why = new Map();
        let [all, prefills] = [0, 0];
        for (const row of ours) {
            if (row.worker === null)
                continue;
            all += 1;
            if (row.role !== null)
                prefills += 1;
            won.set(row.worker, (won.get(row.worker) ?? 0) + 1);
            why.set(whyText(row), (why.get(whyText(row)) ?? 0) + 1);
        }
        // A prompt and its answer are two decisions where two workers share a request: each role has a whole of its own.
        const shareOf = (row) => {
            const of = row.role === "prefill" ? prefills : all - prefills;
            return of === 0 ? 0 : (won.get(`${row.worker}/${row.rank}`) ?? 0) / of;
        };
        this.updateReasons(why, all);
        const ranks = state.ranks().filter((row) => row.models.length > 0);
        const byShare = [...ranks].sort((one, other) => shareOf(other) - shareOf(one) || other.requests - one.requests);
        const some = ranks.length > WORKERS_MAX && all > 0 ? byShare.filter((row) => shareOf(row) > 0) : byShare;
        const shown = some.slice(0, WORKERS_MAX).sort((one, other) => one.key.localeCompare(other.key, "en", { numeric: true }));
        const widest = Math.max(...shown.map(shareOf), 0);
        this.shares.show(shown.map((row) => [row.key, [row, shareOf(row), widest, row.hits[1] > 0 ? percent(row.hits[3] / row.hits[1]) : UNKNOWN]]));
        const more = ranks.length - shown.length;
        this.where.hidden = ranks.length === 0;
        const about = ranks.length === 0 ? WORKERLESS : all === 0 ? "No request yet." : `Of the latest ${all} decisions.`;
        write(this.shareNote, more > 0 ? `${about} ${shown.length === some.length ? `The ${count(more)} others got none` : `The ${shown.length} that got most`}; all are in Fleet.` : about);
    }
    updateReasons(why, all) {
        const sorted = [...why].sort(([, one], [, other]) => other - one).slice(0, REASONS_MAX);
        const widest = (sorted[0]?.[1] ?? 0) / Math.max(all, 1);
        this.reasons.show(sorted.map(([name, times]) => [name, [name, times / all, widest]]));
        this.why.hidden = all === 0;
    }
}
