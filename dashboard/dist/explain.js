// Why did one request go where it went? Every candidate's cost as stacked terms, the winner's lead in a sentence, and what
// the engine then said.
import { get, message } from "./api.js";
import { button, el } from "./dom.js";
import { clock, cost, costCell, count, digits, milliseconds, percent, plural, time, UNKNOWN, workerName } from "./format.js";
const ABOUT = {
    prefill: "prompt to compute",
    credit: "saved by its cache",
    decode: "decode load",
    requests: "running requests",
    wait: "waiting for its turn",
    evict: "computing again what leaves its cache",
};
/** What a candidate's cost is made of. The credit is what it would cost more without its cache: it is drawn behind the sum. */
function parts(decision, candidate) {
    const { terms, seconds } = candidate;
    if (seconds !== undefined) {
        return [
            { name: "wait", kind: "wait", value: seconds.wait },
            { name: "prompt", kind: "prefill", value: seconds.own },
            { name: "delay of others", kind: "requests", value: seconds.delay },
            { name: "decode", kind: "decode", value: seconds.decode },
            { name: "evictions", kind: "evict", value: seconds.evict },
        ];
    }
    const factor = terms.taint_factor || 1;
    const scale = decision.prefill_load_scale * factor;
    return [
        { name: "prompt", kind: "prefill", value: scale * terms.prefill_blocks },
        { name: "decode", kind: "decode", value: factor * terms.decode_blocks },
        { name: "requests", kind: "requests", value: factor * terms.request_cost },
        { name: "credit", kind: "credit", value: scale * (terms.raw_prefill_blocks - terms.prefill_blocks) },
    ];
}
/** Why the winner won, in a sentence. */
export function sentence(decision, nameOf) {
    if (decision.winner === null)
        return `Nobody was chosen: ${decision.error ?? "no worker could take it"}.`;
    const [, reason] = decision.winner;
    const kind = typeof reason === "string" ? reason : (Object.keys(reason)[0] ?? "");
    const detail = typeof reason === "string" ? {} : (reason[kind] ?? {});
    const won = decision.candidate_names.indexOf(decision.winner_name ?? "");
    const who = won >= 0 ? nameOf(won) : workerName(decision.winner_name ?? "", null);
    const chosen = decision.candidates[won];
    switch (kind) {
        case "pinned":
            return `The request named ${who}.`;
        case "session":
            return `Its session lives on ${who}.`;
        case "last_resort":
            return `Every other worker is down or has failed this request; ${who} was the least bad.`;
        case "rule":
            return `${who} was next by the rule of mode ${decision.mode}, which weighs no cost.`;
        case "sampled":
            return `${who} was drawn with a chance of ${percent(detail.probability ?? 0)} (temperature ${decision.temperature}).`;
        default:
    }
    const other = decision.candidates.findIndex((_, index) => index !== won);
    const rival = decision.candidates[other];
    if (chosen === undefined || rival === undefined)
        return `${who} was the only candidate.`;
    const inSeconds = chosen.seconds !== undefined;
    const lead = rival.terms.cost - chosen.terms.cost;
    if (inSeconds && lead < 1e-6)
        return `${who} costs as little as the next, ${nameOf(other)}: where seconds are equal, the worker goes first into whose cache least was written.`;
    if (kind === "tie")
        return `${who} shared the lowest cost with ${detail.among === 2 ? "one other" : `${(detail.among ?? 2) - 1} others`} and was drawn among them.`;
    return `${who} costs ${inSeconds ? cost(lead, true) : plural(cost(lead, false), "block")} less than the next, ${nameOf(other)}: ${because(decision, chosen, rival)}.`;
}
/** What the term says that decided it. */
function because(decision, chosen, rival) {
    switch (decision.deciding) {
        case "cache":
            return `it holds ${digits(chosen.terms.cached_blocks, 3)} of ${decision.request_blocks} blocks of the prompt, the next ${digits(rival.terms.cached_blocks, 3)}`;
        case "prompt":
            return "less prompt work waits there";
        case "decode":
            return chosen.seconds === undefined ? "its running requests hold fewer blocks" : "what runs there is slowed less";
        case "requests":
            return "fewer requests run there";
        case "wait":
            return "the prompt waits less there";
        case "delay":
            return "the prompt delays others less there";
        case "evict":
            return "less that is wanted again leaves its cache";
        default:
            return "by a small margin";
    }
}
function capital(text) {
    return text.charAt(0).toUpperCase() + text.slice(1);
}
export class Explanation {
    close;
    root = el("section", { class: "card explain", "aria-label": "Why this request went where it went", tabindex: -1 });
    asked = "";
    /** The request that is shown had not ended. */
    open = false;
    constructor(close) {
        this.close = close;
    }
    /** A request has ended: if it is shown, it is shown again. */
    ended(id, state) {
        if (this.open && this.asked === id)
            void this.show(id, state);
    }
    async show(id, state) {
        if (this.asked !== id)
            this.fill(id, el("p", { class: "empty" }, "Loading."));
        this.asked = id;
        this.open = false;
        try {
            const decision = await get(`/decisions/${encodeURIComponent(id)}`);
            if (this.asked !== id)
                return;
            this.open = decision.outcome === null;
            this.fill(id, ...this.body(decision, state));
        }
        catch (error) {
            if (this.asked === id)
                this.fill(id, el("p", { class: "empty" }, message(error)));
        }
    }
    fill(id, ...body) {
        const head = el("div", { class: "cardhead" }, el("h2", {}, "Why it went there"), button("Close", this.close, "quiet"));
        this.root.replaceChildren(head, el("p", { class: "soft id" }, id));
        for (const child of body)
            if (child)
                this.root.append(child);
    }
    body(decision, state) {
        const waited = decision.queued.secs + decision.queued.nanos / 1e9;
        const facts = [
            ["Model", decision.model],
            ["At", clock(decision.at_unix_ms, true)],
            ["Prompt", `${count(decision.isl_tokens)} tokens, ${count(decision.request_blocks)} blocks of ${decision.block_size}`],
            ["Candidates", `${decision.eligible} weighed, ${decision.excluded.count} left out`],
        ];
        if (waited > 0.001)
            facts.push(["Waited in the queue", time(waited)]);
        if (decision.failed_before > 0)
            facts.push(["Tried before", `${decision.failed_before} workers failed it${decision.resumed ? "; the answer goes on here" : ""}`]);
        if (decision.learned)
            facts.push(["Learned of the worker", learnedText(decision.learned)]);
        if (decision.shadow)
            facts.push(["Shadow policy", shadowText(decision.shadow)]);
        const { prefill } = decision;
        const legs = prefill === undefined ? this.leg(decision, state) : [el("h3", {}, "The prompt is computed"), ...this.leg(prefill, state), el("h3", {}, "The answer is written"), ...this.leg(decision, state)];
        return [
            ...legs,
            el("h3", {}, "What came of it"),
            outcome(decision),
            list(facts),
        ];
    }
    /** Why one worker was chosen, and what all of them would have cost. */
    leg(decision, state) {
        const nameOf = (index) => state.nameOf(decision.candidate_names[index] ?? "", decision.candidate_urls[index] ?? null);
        return [
            el("p", { class: "why" }, capital(sentence(decision, nameOf))),
            decision.candidates.length > 0 && this.bars(decision, nameOf),
            decision.excluded.named.length > 0 && excluded(decision, state),
        ];
    }
    bars(decision, nameOf) {
        const rows = decision.candidates.map((candidate) => parts(decision, candidate));
        const length = (row) => row.reduce((all, part) => all + part.value, 0);
        const widest = Math.max(...rows.map(length), 1e-9);
        const inSeconds = decision.candidates.some((candidate) => candidate.seconds !== undefined);
        const unit = inSeconds ? "seconds" : "blocks";
        const used = new Set(rows.flatMap((row) => row.filter((part) => part.value > 0).map((part) => part.kind)));
        const legend = el("ul", { class: "keys" });
        for (const kind of Object.keys(ABOUT)) {
            if (used.has(kind))
                legend.append(el("li", {}, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), inSeconds && kind === "requests" ? "delay of others" : ABOUT[kind]));
        }
        const body = el("tbody");
        rows.forEach((row, index) => {
            const candidate = decision.candidates[index];
            if (candidate === undefined)
                return;
            const won = decision.candidate_names[index] === decision.winner_name;
            const bar = el("div", { class: "stack", "aria-hidden": "true" });
            for (const part of row) {
                if (part.value <= 0)
                    continue;
                const piece = el("span", { class: `piece ${part.kind}`, title: `${part.name}: ${cost(part.value, inSeconds)}` });
                piece.style.width = `${(part.value / widest) * 100}%`;
                bar.append(piece);
            }
            // The sum, as it is added up; what the cache saved is in it no more.
            const sum = row.filter((part) => part.kind !== "credit" && (part.kind === "prefill" || part.value > 0));
            const saved = row.find((part) => part.kind === "credit" && part.value > 0);
            const figures = sum.map((part) => `${part.name} ${cost(part.value, inSeconds)}`).join(" + ") + (saved ? `; saved ${cost(saved.value, inSeconds)}` : "");
            body.append(el("tr", { class: won ? "won" : "" }, el("th", { scope: "row" }, won ? "▶ " : "", nameOf(index), won && el("span", { class: "hidden" }, " (chosen)")), el("td", { class: "num" }, costCell(candidate.terms.cost, inSeconds)), el("td", { class: "num" }, `${digits(candidate.terms.cached_blocks, 3)}`), el("td", { class: "wide" }, bar, el("span", { class: "soft terms" }, figures))));
        });
        const more = decision.eligible - decision.candidates.length;
        return el("div", {}, legend, el("table", { class: "candidates" }, el("caption", { class: "hidden" }, `Candidates and their cost in ${unit}, cheapest first`), el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Candidate"), el("th", { scope: "col", class: "num" }, "Cost"), el("th", { scope: "col", class: "num" }, "Cached"), el("th", { scope: "col" }, `Terms, in ${unit}`))), body), more > 0 && decision.mode === "kv" && el("p", { class: "soft" }, `${count(more)} dearer candidates are not kept.`));
    }
}
/** What has been learned of a worker, in figures that one can check. */
function learnedText(learned) {
    const figures = `8k prompt ${time(learned.prompt_8k_s)}, step ${time(learned.step_64x2k_s)} at 64 × 2k`;
    return `${figures}, from ${count(learned.prompt_samples)} runs of prompts and ${count(learned.step_samples)} of steps there`;
}
function shadowText(shadow) {
    if (!shadow.disagrees)
        return `${shadow.policy} agrees`;
    const other = workerName(shadow.name, shadow.url);
    return `${shadow.policy} would have chosen ${other}, ${judged(shadow.regret_s)} by the time model`;
}
/** What a regret in seconds of the time model says. */
export function judged(regret) {
    if (regret === 0)
        return "as dear";
    return `${time(Math.abs(regret))} ${regret > 0 ? "cheaper" : "dearer"}`;
}
function excluded(decision, state) {
    const words = decision.excluded.named.map(([, reason], index) => {
        const name = decision.excluded_names[index] ?? "";
        return `${state.nameOf(name)} (${reason.replaceAll("_", " ")})`;
    });
    const more = decision.excluded.count - words.length;
    return el("p", { class: "soft" }, `Left out: ${words.join(", ")}${more > 0 ? `, and ${more} more` : ""}.`);
}
function outcome(decision) {
    const ended = decision.outcome;
    if (ended === null)
        return el("p", { class: "soft" }, "The request has not ended, or is remembered no more.");
    const predicted = ended.predicted_cached_tokens;
    const reported = ended.reported_cached_tokens;
    const rows = [
        ["Status", statusText(ended.status)],
        ["Predicted as cached", predicted === null ? UNKNOWN : `${count(predicted)} tokens`],
        ["Reported as cached", reported === null ? "the engine did not say" : `${count(reported)} of ${count(ended.prompt_tokens)} tokens`],
        ["First token", milliseconds(ended.ttft_ms)],
        ["Whole answer", `${milliseconds(ended.total_ms)}, ${count(ended.output_tokens)} tokens`],
    ];
    if (ended.moves > 0)
        rows.push(["Moved", `${ended.moves} times to another worker`]);
    if (ended.client_request_id)
        rows.push(["Client's name of it", ended.client_request_id]);
    return list(rows);
}
export function statusText(status) {
    if (status < 400)
        return `${status} ok`;
    if (status === 499)
        return "the client left";
    if (status === 429 || status === 503 || status === 529)
        return `${status} rejected`;
    return `${status} failed`;
}
function list(rows) {
    const facts = el("dl", { class: "facts" });
    for (const [name, value] of rows)
        facts.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
    return facts;
}
