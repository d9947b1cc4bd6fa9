// How does a figure go over the last 15 minutes? Lines over steps, with the figures below: those of the last minute, or
// those under the pointer. Arrow keys move the pointer, too.
import { el, mark, svg, write } from "./dom.js";
import { clock } from "./format.js";
const HEIGHT = 132;
const LEFT = 46;
const BOTTOM = 18;
const TOP = 8;
/** The next of 1, 2, 4, 6, 10 times a power of ten: half of it is a short number, too. */
export function niceCeiling(value, least) {
    if (!(value > least))
        return least;
    const power = 10 ** Math.floor(Math.log10(value));
    const found = [1, 2, 4, 6, 10].find((step) => step * power >= value * 0.999) ?? 10;
    return found * power;
}
/** Minutes that the axis may have: it grows with what there is to show. */
const SPANS = [2, 5, 15];
export class Chart {
    title;
    lines;
    unit;
    least;
    fixed;
    root;
    plot = svg("svg", { class: "plot", role: "img", height: HEIGHT });
    when = el("span", { class: "soft" }, "last minute");
    values = [];
    paths = [];
    grid = svg("g", { class: "grid" });
    cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
    at = null;
    state = null;
    width = 0;
    steps = 180;
    constructor(title, lines, unit, 
    /** The top of the axis at least, and whether it is never higher. */
    least = 0.01, fixed = false) {
        this.title = title;
        this.lines = lines;
        this.unit = unit;
        this.least = least;
        this.fixed = fixed;
        const legend = el("dl", { class: "legend" });
        for (const line of lines) {
            const value = el("dd");
            const key = svg("svg", { class: "key", width: 24, height: 8, "aria-hidden": "true" }, svg("line", { class: `line ${line.look}`, x1: 0, x2: 24, y1: 4, y2: 4 }));
            legend.append(el("div", {}, el("dt", {}, key, line.name), value));
            this.values.push(value);
            const path = svg("path", { class: `line ${line.look}` });
            this.paths.push(path);
        }
        this.plot.append(this.grid, ...this.paths, this.cursor);
        const box = el("div", { class: "plotbox", tabindex: 0, "aria-label": `${title}, up to 15 minutes; arrow keys step through time` }, this.plot);
        box.addEventListener("pointermove", (event) => this.point(event.offsetX));
        box.addEventListener("pointerleave", () => this.step(null));
        box.addEventListener("blur", () => this.step(null));
        box.addEventListener("keydown", (event) => this.key(event));
        this.root = el("figure", { class: "card chart" }, el("figcaption", {}, el("h3", {}, title), this.when), box, legend);
    }
    update(state) {
        this.state = state;
        this.width = Math.max(200, this.plot.clientWidth);
        const rows = state.rows();
        const columns = this.lines.map((line) => state.column(line.column));
        const top = this.fixed ? this.least : niceCeiling(this.highest(rows, columns), this.least);
        const perMinute = 60_000 / state.stepMs;
        const minutes = SPANS.find((span) => rows.length <= span * perMinute) ?? (state.steps / perMinute);
        this.steps = minutes * perMinute;
        mark(this.plot, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
        this.drawGrid(top, minutes);
        columns.forEach((column, line) => {
            const path = this.paths[line];
            if (path !== undefined)
                mark(path, "d", this.path(rows, column, top));
        });
        this.write(state, rows);
    }
    highest(rows, columns) {
        let most = 0;
        for (const row of rows)
            for (const column of columns)
                most = Math.max(most, row[column] ?? 0);
        return most;
    }
    x(at, rows) {
        const back = rows.length - 1 - at;
        return this.width - 4 - (back * (this.width - LEFT - 4)) / (this.steps - 1);
    }
    path(rows, column, top) {
        let path = "";
        let pen = false;
        rows.forEach((row, at) => {
            const value = row[column] ?? null;
            if (value === null) {
                pen = false;
                return;
            }
            const y = HEIGHT - BOTTOM - (Math.min(value, top) / top) * (HEIGHT - BOTTOM - TOP);
            const x = this.x(at, rows);
            // A figure between two gaps is a short line.
            const alone = (rows[at + 1]?.[column] ?? null) === null;
            const from = alone ? `M${(x - 5).toFixed(1)} ${y.toFixed(1)}h5` : `M${x.toFixed(1)} ${y.toFixed(1)}`;
            path += pen ? `L${x.toFixed(1)} ${y.toFixed(1)}` : from;
            pen = true;
        });
        return path;
    }
    drawGrid(top, minutes) {
        const want = `${this.width} ${top} ${minutes}`;
        if (this.grid.getAttribute("data-for") === want)
            return;
        this.grid.setAttribute("data-for", want);
        this.grid.replaceChildren();
        for (const share of [0, 0.5, 1]) {
            const y = HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP);
            this.grid.append(svg("line", { x1: LEFT, x2: this.width - 4, y1: y, y2: y }));
            this.grid.append(svg("text", { x: LEFT - 6, y: y + 4, class: "tick end" }, this.unit(top * share)));
        }
        for (const back of minutes === 15 ? [15, 10, 5, 0] : minutes === 5 ? [5, 3, 1, 0] : [2, 1, 0]) {
            const x = this.width - 4 - (back / minutes) * (this.width - LEFT - 4);
            const place = back === minutes ? "" : back === 0 ? " end" : " middle";
            this.grid.append(svg("text", { x, y: HEIGHT - 4, class: `tick${place}` }, back === 0 ? "now" : `−${back} min`));
        }
    }
    write(state, rows) {
        const at = this.at === null ? null : Math.min(this.at, rows.length - 1);
        const row = at === null ? null : rows[at];
        this.cursor.toggleAttribute("data-on", row !== null && row !== undefined);
        if (row && at !== null) {
            const x = this.x(at, rows);
            mark(this.cursor, "x1", String(x));
            mark(this.cursor, "x2", String(x));
            write(this.when, clock(state.started + (row[0] ?? 0) * state.stepMs));
        }
        else
            write(this.when, "last minute");
        const told = [];
        this.lines.forEach((line, index) => {
            const value = row ? (row[state.column(line.column)] ?? null) : state.minute(line.column);
            const text = this.unit(value);
            const place = this.values[index];
            if (place !== undefined)
                write(place, text);
            told.push(`${line.name} ${text}`);
        });
        mark(this.plot, "aria-label", `${this.title}: ${told.join(", ")}`);
    }
    point(x) {
        const rows = this.state?.rows() ?? [];
        const back = Math.round(((this.width - 4 - x) * (this.steps - 1)) / (this.width - LEFT - 4));
        const at = rows.length - 1 - back;
        this.step(at >= 0 && at < rows.length ? at : null);
    }
    key(event) {
        const rows = this.state?.rows() ?? [];
        const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -12, PageDown: 12 }[event.key];
        if (by === undefined || rows.length === 0)
            return;
        event.preventDefault();
        const from = this.at ?? rows.length - 1;
        this.step(Math.min(rows.length - 1, Math.max(0, from + by)));
    }
    step(at) {
        this.at = at;
        if (this.state !== null)
            this.write(this.state, this.state.rows());
    }
}
