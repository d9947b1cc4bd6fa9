// Which requests were routed of late, where to, and what came of them? Live without a filter; with one, the server looks
// through all decisions that it keeps.
import { get, message } from "./api.js";
import { button, el, Keyed, mark, write } from "./dom.js";
import { Explanation, statusText } from "./explain.js";
import { clock, costCell, count, milliseconds, percent, UNKNOWN } from "./format.js";
import { rankName } from "./state.js";
/** Rows that are shown at once. */
const SHOWN_MAX = 100;
/** How often a filtered list is asked for. */
const ASK_MS = 3000;
const OUTCOMES = ["", "ok", "failed", "rejected", "cancelled", "running"];
export function outcomeText(row) {
    if (row.error !== null)
        return "refused";
    if (row.superseded)
        return "taken over";
    return row.outcome === null ? "running" : statusText(row.outcome.status);
}
/** How a row is marked: the word in it says the same. */
function tone(row) {
    if (row.error !== null)
        return "bad";
    if (row.superseded)
        return "warn";
    if (row.outcome === null)
        return "idle";
    const { status } = row.outcome;
    return status < 400 ? "ok" : status === 499 ? "warn" : "bad";
}
const DECIDED = {
    cache: "holds more of the prompt",
    prompt: "less prompt work waits",
    decode: "less decode load",
    requests: "fewer requests",
    wait: "shorter wait",
    delay: "delays others less",
    evict: "evicts less",
};
const REASONS = {
    "lowest cost": "lowest cost",
    tie: "equal cost, drawn",
    drawn: "drawn by temperature",
    pinned: "named by the request",
    session: "its session is there",
    "last resort": "all others failed it",
    rule: "its turn",
};
/** Why a worker was chosen, in a few words. */
export function whyText(row) {
    if (row.reason === null)
        return row.error ?? "";
    if (row.deciding !== null)
        return DECIDED[row.deciding] ?? row.deciding;
    if (row.eligible === 1 && row.reason !== "pinned" && row.reason !== "session")
        return "only candidate";
    return REASONS[row.reason] ?? row.reason;
}
/** Predicted against reported share of the prompt. */
function hits(row) {
    // What the worker of the answer has cached saves nothing where the prompt comes from another.
    if (row.prefilled)
        return UNKNOWN;
    const predicted = row.tokens > 0 ? percent(row.predicted / row.tokens) : UNKNOWN;
    const ended = row.outcome;
    if (ended === null || ended.reported_cached_tokens === null || !ended.prompt_tokens)
        return `${predicted} / ${UNKNOWN}`;
    return `${predicted} / ${percent(ended.reported_cached_tokens / ended.prompt_tokens)}`;
}
class Row {
    root;
    cells = [];
    open;
    constructor(row, show) {
        this.open = button(clock(row.at, true), () => undefined, "linklike");
        // The button's own click rises to the row.
        this.root = el("tr", { onclick: () => show(row.id) }, el("th", { scope: "row" }, this.open));
        for (const kind of ["", "", "num", "num", "", "num", "num", ""]) {
            const cell = el("td", { class: kind });
            this.cells.push(cell);
            this.root.append(cell);
        }
    }
    update(row, state, chosen) {
        const texts = [
            row.model,
            (row.worker === null ? "nobody" : state.nameOf(row.worker)) + (row.role === null ? "" : " (prefill)"),
            count(row.tokens),
            hits(row),
            whyText(row),
            costCell(row.cost, row.seconds),
            milliseconds(row.outcome?.ttft_ms ?? null),
        ];
        texts.forEach((text, index) => {
            const cell = this.cells[index];
            if (cell !== undefined)
                write(cell, text);
        });
        const last = this.cells[texts.length];
        if (last !== undefined) {
            write(last, outcomeText(row));
            last.className = `tone ${tone(row)}`;
        }
        mark(this.open, "aria-label", `${clock(row.at, true)}, to ${texts[1]}: why`);
        mark(this.root, "aria-current", row.id === chosen ? "true" : null);
    }
}
/** A table of decisions, in the overview and in its own view. */
export class DecisionTable {
    chosen;
    root;
    empty = el("p", { class: "empty" });
    rows;
    state = null;
    constructor(show, chosen) {
        this.chosen = chosen;
        const body = el("tbody");
        this.rows = new Keyed(body, (row) => new Row(row, show), (made, row) => this.state && made.update(row, this.state, this.chosen()));
        const head = el("tr");
        for (const [name, kind] of [["Time", ""], ["Model", ""], ["Went to", ""], ["Prompt", "num"], ["Cached, predicted / found", "num"], ["Why there", ""], ["Cost", "num"], ["First token", "num"], ["Outcome", ""]]) {
            head.append(el("th", { scope: "col", class: kind }, name));
        }
        const table = el("table", { class: "rows decisions" }, el("caption", { class: "hidden" }, "Decisions, newest first"), el("thead", {}, head), body);
        this.root = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Decisions" }, table, this.empty);
    }
    update(state, rows, none) {
        this.state = state;
        // A request that was tried twice has two rows.
        const seen = new Map();
        const keyed = rows.map((row) => {
            const at = seen.get(row.id) ?? 0;
            seen.set(row.id, at + 1);
            return [`${row.id} ${row.at} ${at}`, row];
        });
        this.rows.show(keyed);
        write(this.empty, rows.length === 0 ? none : "");
        this.empty.hidden = rows.length > 0;
    }
}
export class DecisionsView {
    root = el("div", { class: "view split" });
    worker = el("select", { id: "filter-worker" });
    outcome = el("select", { id: "filter-outcome" });
    pause = button("Pause", () => this.hold(), "quiet");
    said = el("p", { class: "soft", role: "status" });
    /** Apart from what is read aloud: it changes every second. */
    skipped = el("p", { class: "soft" });
    explanation = new Explanation(() => this.show(null));
    table = new DecisionTable((id) => this.show(id), () => this.chosen);
    chosen = null;
    held = null;
    asked = null;
    pointed = null;
    timer = 0;
    state = null;
    constructor(chosen) {
        for (const outcome of OUTCOMES)
            this.outcome.append(el("option", { value: outcome }, outcome === "" ? "any" : outcome));
        for (const select of [this.worker, this.outcome])
            select.addEventListener("change", () => this.filter());
        const tools = el("div", { class: "toolbar" }, el("label", {}, "Worker ", this.worker), el("label", {}, "Outcome ", this.outcome), this.pause, this.said, this.skipped);
        const list = el("section", { class: "card" }, el("h2", {}, "Decisions"), tools, this.table.root);
        this.table.root.addEventListener("pointerenter", (event) => {
            if (event.pointerType === "mouse")
                this.pointed = [...(this.state?.decisions ?? [])];
        });
        this.table.root.addEventListener("pointerleave", () => (this.pointed = null));
        this.explanation.root.addEventListener("keydown", (event) => {
            if (event.key === "Escape")
                this.show(null);
        });
        this.root.append(list);
        this.chosen = chosen;
    }
    update(state) {
        const first = this.state === null;
        this.state = state;
        this.fillWorkers(state);
        this.list(state);
        if (first && this.chosen !== null)
            this.show(this.chosen);
        const chosen = state.decisions.find((row) => row.id === this.chosen);
        if (chosen?.outcome)
            this.explanation.ended(chosen.id, state);
    }
    leave() {
        window.clearTimeout(this.timer);
    }
    list(state) {
        // Rows that move away under the pointer cannot be clicked.
        const still = this.held ?? this.pointed;
        const all = this.asked ?? still ?? state.decisions;
        const ours = state.scope === "" ? all : all.filter((row) => row.model === state.scope);
        const none = this.asked !== null ? "No decision that is kept fits the filter." : "No decision yet: send a request, and it is here within a second.";
        this.table.update(state, ours.slice(0, SHOWN_MAX), none);
        const skipped = state.skipped > 0 && this.asked === null && still === null ? `${count(state.skipped)} more in the last second` : "";
        write(this.said, this.asked !== null ? `${ours.length} found among those kept` : this.held !== null ? "paused" : this.pointed !== null ? "still while you point at it" : "");
        write(this.skipped, skipped);
    }
    fillWorkers(state) {
        const names = new Map();
        for (const row of state.ranks())
            names.set(row.worker, row.ranks > 1 ? rankName({ ...row, ranks: 1 }) : rankName(row));
        const want = [...names].join();
        if (this.worker.dataset.for === want)
            return;
        this.worker.dataset.for = want;
        const kept = this.worker.value;
        this.worker.replaceChildren(el("option", { value: "" }, "any"));
        for (const [id, name] of names)
            this.worker.append(el("option", { value: id }, name));
        this.worker.value = names.has(kept) ? kept : "";
    }
    hold() {
        this.held = this.held === null ? [...(this.state?.decisions ?? [])] : null;
        write(this.pause, this.held === null ? "Pause" : "Go on");
        if (this.state !== null)
            this.list(this.state);
    }
    filter() {
        window.clearTimeout(this.timer);
        if (this.worker.value === "" && this.outcome.value === "") {
            this.asked = null;
            if (this.state !== null)
                this.list(this.state);
            return;
        }
        void this.ask();
    }
    async ask() {
        const query = new URLSearchParams({ role: "any" });
        const scope = this.state?.scope ?? "";
        if (scope !== "")
            query.set("model", scope);
        if (this.worker.value !== "")
            query.set("worker", this.worker.value);
        if (this.outcome.value !== "")
            query.set("outcome", this.outcome.value);
        try {
            const found = await get(`/decisions?${query.toString()}`);
            this.asked = found.decisions.map(asRow);
        }
        catch (error) {
            this.asked = [];
            write(this.said, message(error));
        }
        if (this.state !== null && this.root.isConnected) {
            this.list(this.state);
            this.timer = window.setTimeout(() => this.filter(), ASK_MS);
        }
    }
    show(id) {
        this.chosen = id;
        history.replaceState(null, "", id === null ? "#decisions" : `#decisions/${encodeURIComponent(id)}`);
        if (this.state === null)
            return;
        if (id === null)
            this.explanation.root.remove();
        else {
            this.root.append(this.explanation.root);
            void this.explanation.show(id, this.state);
        }
        // On a narrow window this moves it above the list: only then is it where it can be scrolled to.
        this.root.classList.toggle("open", id !== null);
        this.list(this.state);
        if (id === null) {
            this.table.root.focus({ preventScroll: true });
            return;
        }
        this.explanation.root.focus({ preventScroll: true });
        if (matchMedia("(max-width: 1100px)").matches)
            window.scrollTo({ top: 0 });
    }
}
/** A decision as the server tells it in full, as a row. */
function asRow(decision) {
    const won = decision.candidate_names.indexOf(decision.winner_name ?? "");
    const chosen = decision.candidates[won];
    const rival = decision.candidates.find((_, index) => index !== won);
    const reason = decision.winner?.[1] ?? null;
    const kind = reason === null ? null : typeof reason === "string" ? reason : (Object.keys(reason)[0] ?? null);
    const { indexed, in_flight, evicted } = decision.predicted;
    return {
        id: decision.id,
        at: decision.at_unix_ms,
        model: decision.model,
        role: decision.role,
        worker: decision.winner_name,
        reason: kind?.replaceAll("_", " ") ?? null,
        deciding: decision.deciding,
        cost: chosen?.terms.cost ?? null,
        runner_up: rival?.terms.cost ?? null,
        seconds: chosen?.seconds !== undefined,
        tokens: decision.isl_tokens,
        blocks: decision.request_blocks,
        cached_blocks: chosen?.terms.cached_blocks ?? null,
        predicted: Math.max(0, indexed + in_flight - evicted),
        eligible: decision.eligible,
        excluded: decision.excluded.count,
        queued_ms: decision.queued.secs * 1000 + decision.queued.nanos / 1e6,
        failed_before: decision.failed_before,
        resumed: decision.resumed,
        error: decision.error,
        outcome: decision.outcome,
        superseded: decision.superseded ?? false,
    };
}
