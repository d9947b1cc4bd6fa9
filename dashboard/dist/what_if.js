// How would the latest decisions have gone with other weights? The server scores the recorded candidates again with the cost
// it routes by.
import { message, post } from "./api.js";
import { button, card, el, write } from "./dom.js";
import { count, digits, percent } from "./format.js";
const SLIDERS = [
    { name: "overlap_score_credit", flag: "--router-kv-overlap-score-credit", about: "Worth of a cached block. 0 ignores caches.", max: 1, step: 0.05 },
    { name: "overlap_score_credit_decay", flag: "--router-kv-overlap-score-credit-decay", about: "How fast that worth fades on ranks with more prompt work waiting.", max: 4, step: 0.1 },
    { name: "prefill_load_scale", flag: "--router-prefill-load-scale", about: "Weight of prompt work against decode load.", max: 8, step: 0.1 },
    { name: "decode_active_request_weight", flag: "--router-decode-active-request-weight", about: "Cost of each running request, in blocks.", max: 32, step: 0.5 },
];
/** Time after the last move of a slider. */
const SETTLE_MS = 150;
const RANKS_MAX = 24;
const MOVES_MAX = 12;
export class WhatIfView {
    show;
    root = el("div", { class: "view" });
    inputs = new Map();
    shown = new Map();
    last = el("select", { id: "last" });
    said = el("p", { class: "why", role: "status" }, "Move a slider.");
    note = el("p", { class: "soft" });
    result = el("div");
    set = null;
    timer = 0;
    asked = 0;
    state = null;
    constructor(show) {
        this.show = show;
        for (const last of [100, 500, 1000])
            this.last.append(el("option", { value: last }, String(last)));
        this.last.value = "500";
        this.last.addEventListener("change", () => this.soon());
        const form = el("div", { class: "sliders" });
        for (const slider of SLIDERS) {
            const input = el("input", { type: "range", id: slider.name, min: 0, max: slider.max, step: slider.step, value: 0, "aria-describedby": `${slider.name}-about` });
            const value = el("output", { for: slider.name });
            input.addEventListener("input", () => this.soon());
            this.inputs.set(slider.name, input);
            this.shown.set(slider.name, value);
            form.append(el("div", { class: "slider" }, el("label", { for: slider.name }, el("code", {}, slider.flag)), value, input, el("p", { class: "soft", id: `${slider.name}-about` }, slider.about)));
        }
        const tools = el("div", { class: "toolbar" }, el("label", {}, "Of the latest ", this.last, " decisions"), button("Back to what is set", () => this.reset(), "quiet"));
        this.root.append(card("What if the weights were others?", el("p", { class: "soft" }, "Nothing is changed by moving these: the recorded candidates are scored again. What a different choice would have changed for later requests is not followed; kvasir replay does that."), form, tools), card("How they would have gone", this.said, this.note, this.result));
    }
    update(state) {
        this.state = state;
        const model = state.models.find((row) => state.scope === "" || row.name === state.scope);
        if (model === undefined) {
            write(this.said, "No model is served yet.");
            return;
        }
        if (this.set === null) {
            this.set = model.weights;
            this.reset();
        }
    }
    leave() {
        window.clearTimeout(this.timer);
    }
    reset() {
        for (const slider of SLIDERS) {
            const input = this.inputs.get(slider.name);
            if (input !== undefined && this.set !== null)
                input.value = String(this.set[slider.name]);
        }
        this.soon();
    }
    soon() {
        for (const slider of SLIDERS) {
            const input = this.inputs.get(slider.name);
            const value = this.shown.get(slider.name);
            if (input === undefined || value === undefined)
                continue;
            const own = Number(input.value);
            const set = this.set?.[slider.name];
            write(value, set === undefined || own === set ? input.value : `${input.value} (set: ${set})`);
        }
        window.clearTimeout(this.timer);
        this.timer = window.setTimeout(() => void this.ask(), SETTLE_MS);
    }
    async ask() {
        this.asked += 1;
        const number = this.asked;
        const weights = {};
        for (const [name, input] of this.inputs)
            weights[name] = Number(input.value);
        const scope = this.state?.scope ?? "";
        try {
            const answer = await post("/what_if", { model: scope === "" ? null : scope, last: Number(this.last.value), weights });
            if (number === this.asked)
                this.tell(answer);
        }
        catch (error) {
            if (number === this.asked)
                write(this.said, message(error));
        }
    }
    tell(answer) {
        const { considered, moved, before, after, prompt_blocks: blocks } = answer;
        this.result.replaceChildren();
        if (considered === 0) {
            write(this.said, answer.skipped === 0 ? "No decision is recorded yet." : "None of the latest decisions was made by a cost: they were pinned, by session, or in a mode that weighs none.");
            write(this.note, "");
            return;
        }
        write(this.said, moved === 0 ? `All ${count(considered)} would have gone where they went.` : `${count(moved)} of ${count(considered)} (${percent(moved / considered)}) would have gone elsewhere.`);
        const notes = [];
        const inSeconds = this.state?.models.some((row) => row.policy === "time" && (this.state?.scope === "" || row.name === this.state?.scope));
        if (inSeconds)
            notes.push("These decisions were made in seconds, which has no weights: what is shown is what the cost in blocks would have chosen.");
        if (answer.skipped > 0)
            notes.push(`${count(answer.skipped)} were not made by a cost, or by weights of their own, and are left out.`);
        if (answer.partial > 0)
            notes.push(`${count(answer.partial)} had more than the 8 candidates that are kept: a dearer one may have become the best.`);
        write(this.note, notes.join(" "));
        const each = (value) => digits(value / considered, 3);
        const facts = [
            ["Prompt blocks cached where they go", percent(blocks > 0 ? before.cached_blocks / blocks : null), percent(blocks > 0 ? after.cached_blocks / blocks : null)],
            ["Prompt blocks to compute there, each", each(before.queued_prompt_blocks), each(after.queued_prompt_blocks)],
            ["Decode blocks there, each", each(before.decode_blocks), each(after.decode_blocks)],
        ];
        const head = (...names) => el("thead", {}, el("tr", {}, ...names.map((name, index) => el("th", { scope: "col", class: index > 0 ? "num" : "" }, name))));
        const sums = el("table", { class: "rows narrow" }, el("caption", { class: "hidden" }, "What would have been different"), head("Of these decisions", "as it was", "what if"), el("tbody", {}, ...facts.map(([name, was, is]) => el("tr", {}, el("th", { scope: "row" }, name ?? ""), el("td", { class: "num" }, was ?? ""), el("td", { class: "num" }, is ?? "")))));
        const key = (kind, name) => el("li", {}, el("span", { class: `swatch bar ${kind}`, "aria-hidden": "true" }), name);
        this.result.append(sums, el("ul", { class: "keys" }, key("was", "as it was"), key("is", "what if")), this.ranks(answer), this.moves(answer));
    }
    name(worker) {
        return this.state?.nameOf(worker) ?? worker;
    }
    ranks(answer) {
        const most = Math.max(...answer.ranks.map((row) => Math.max(row.before, row.after)), 1);
        const shown = [...answer.ranks].sort((one, other) => Math.abs(other.after - other.before) - Math.abs(one.after - one.before) || other.before - one.before).slice(0, RANKS_MAX);
        const body = el("tbody");
        for (const row of shown) {
            const bars = el("div", { class: "pair", "aria-hidden": "true" });
            for (const [kind, value] of [["was", row.before], ["is", row.after]]) {
                const bar = el("span", { class: `bar ${kind}` });
                bar.style.width = `${(value / most) * 100}%`;
                bars.append(bar);
            }
            const change = row.after - row.before;
            body.append(el("tr", {}, el("th", { scope: "row" }, this.name(row.worker)), el("td", { class: "wide" }, bars), el("td", { class: "num" }, count(row.before)), el("td", { class: "num" }, count(row.after)), el("td", { class: "num" }, change === 0 ? "0" : change > 0 ? `+${change}` : `−${-change}`)));
        }
        const head = el("tr", {}, el("th", { scope: "col" }, "Worker"), el("th", { scope: "col" }, "Decisions"), el("th", { scope: "col", class: "num" }, "was"), el("th", { scope: "col", class: "num" }, "what if"), el("th", { scope: "col", class: "num" }, "change"));
        const more = answer.ranks.length - shown.length;
        return el("div", { class: "scroll" }, el("table", { class: "rows" }, el("caption", { class: "hidden" }, "Decisions by worker"), el("thead", {}, head), body), more > 0 && el("p", { class: "soft" }, `${more} more change less.`));
    }
    moves(answer) {
        const list = el("ul", { class: "moves" });
        for (const moved of answer.moves.slice(0, MOVES_MAX)) {
            const [was, is] = moved.cached_blocks;
            const text = `${this.name(moved.from)} → ${this.name(moved.to)}: ${digits(was, 3)} → ${digits(is, 3)} of ${moved.blocks} blocks cached`;
            list.append(el("li", {}, button(text, () => this.show(moved.id), "linklike")));
        }
        return answer.moves.length === 0 ? el("div") : el("div", {}, el("h3", {}, "Some that move"), list);
    }
}
