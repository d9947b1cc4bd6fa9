// What does the page know? All that the stream told, bounded as the stream bounds it.
import { planeHost, workerName } from "./format.js";
/** Decisions that the page keeps. */
const DECISIONS_MAX = 300;
export class State {
    version = "";
    started = 0;
    at = 0;
    stepMs = 5000;
    steps = 180;
    canAct = false;
    draining = false;
    ready = false;
    leftOut = 0;
    /** Decisions that were made and not listed, in the last second. */
    skipped = 0;
    /** Model that is looked at; empty for all. */
    scope = "";
    models = [];
    fleet = new Map();
    /** The same by their names in decisions (`7/0`). */
    byName = new Map();
    /** Newest first. */
    decisions = [];
    columns = [];
    history = new Map();
    latest = {};
    hello(told) {
        this.version = told.version;
        this.started = told.started;
        this.stepMs = told.step_ms;
        this.steps = told.steps;
        this.canAct = told.can_act;
        this.columns = told.columns;
        this.fleet.clear();
        this.byName.clear();
        this.decisions = [];
        this.history = new Map(Object.entries(told.history).map(([scope, rows]) => [scope, [...rows]]));
        this.skipped = 0;
        this.ready = true;
        this.change(told);
    }
    tick(told) {
        for (const key of told.gone) {
            const row = this.fleet.get(key);
            if (row !== undefined)
                this.byName.delete(`${row.worker}/${row.rank}`);
            this.fleet.delete(key);
        }
        this.skipped = told.skipped;
        this.change(told);
        if (told.ended.length > 0) {
            const ended = new Map(told.ended.map((one) => [one.id, one.outcome]));
            for (const row of this.decisions)
                if (!row.superseded)
                    row.outcome ??= ended.get(row.id) ?? null;
        }
    }
    change(told) {
        this.at = told.at;
        this.draining = told.draining;
        this.leftOut = told.left_out;
        for (const row of told.fleet) {
            this.fleet.set(row.key, row);
            this.byName.set(`${row.worker}/${row.rank}`, row);
        }
        if (told.models !== undefined)
            this.models = told.models;
        if (told.decisions.length > 0) {
            const newest = [...told.decisions].reverse();
            this.decisions = [...newest, ...this.decisions].slice(0, DECISIONS_MAX);
            relate(this.decisions);
        }
        if (told.traffic !== null) {
            this.latest = told.traffic;
            for (const [scope, traffic] of Object.entries(told.traffic))
                this.addStep(scope, traffic.step);
        }
    }
    addStep(scope, step) {
        const rows = this.history.get(scope) ?? [];
        if (rows.at(-1)?.[0] === step[0])
            rows.pop();
        rows.push(step);
        if (rows.length > this.steps)
            rows.shift();
        this.history.set(scope, rows);
    }
    /** The steps of what is looked at, oldest first. */
    rows() {
        return this.history.get(this.scope) ?? [];
    }
    column(name) {
        return this.columns.indexOf(name);
    }
    traffic(scope = this.scope) {
        return this.latest[scope] ?? null;
    }
    /** A figure of the last minute. */
    minute(name) {
        return this.traffic()?.minute[this.column(name)] ?? null;
    }
    /** Ranks of what is looked at. */
    ranks() {
        const all = [...this.fleet.values()];
        return this.scope === "" ? all : all.filter((row) => row.models.includes(this.scope));
    }
    /** How people call a worker's rank, by its name in decisions (`7/0`); its address where it is known from elsewhere. */
    nameOf(worker, url = null) {
        const row = this.byName.get(worker);
        return row === undefined ? workerName(worker, url) : rankName(row);
    }
}
/** How people call a rank. */
export function rankName(row) {
    const name = workerName(row.worker, row.url ?? planeHost(row.address));
    return row.ranks > 1 ? `${name} rank ${row.rank}` : name;
}
/** Marks those that a later worker took over, and those whose prompt another worker computed. Newest first. */
function relate(rows) {
    const seen = new Set();
    const prefills = new Set();
    for (const row of rows) {
        const leg = `${row.id} ${row.role ?? ""}`;
        if (seen.has(leg))
            row.superseded = true;
        seen.add(leg);
        if (row.role !== null)
            prefills.add(row.id);
    }
    for (const row of rows)
        if (row.role === null && prefills.has(row.id))
            row.prefilled = true;
}
