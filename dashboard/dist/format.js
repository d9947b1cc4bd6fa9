// How are figures written? Short, with a unit, the same everywhere. What is not known is a dash.
export const UNKNOWN = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
/** 0, 7, 1,234, 12.3k, 4.5M. */
export function count(value) {
    if (value === null || value === undefined)
        return UNKNOWN;
    if (value < 10_000)
        return whole.format(value);
    if (value < 1e6)
        return `${digits(value / 1e3, 3)}k`;
    return `${digits(value / 1e6, 3)}M`;
}
/** So many significant digits, without zeros at the end. */
export function digits(value, significant) {
    if (value === 0)
        return "0";
    return String(Number(value.toPrecision(significant)));
}
/** A cost in a column: figures below each other have their points below each other. */
export function costCell(value, seconds) {
    if (value === null || seconds)
        return cost(value, seconds);
    return value < 1000 ? value.toFixed(1) : count(value);
}
/** So many of something, in the right number. */
export function plural(value, one) {
    return `${value} ${one}${value === "1" ? "" : "s"}`;
}
/** A cost: blocks, or seconds where the policy counts in seconds. */
export function cost(value, seconds) {
    if (value === null)
        return UNKNOWN;
    return seconds ? time(value) : digits(value, value < 100 ? 3 : 4);
}
/** Seconds as µs, ms or s. */
export function time(seconds, significant = 3) {
    if (seconds === null || seconds === undefined)
        return UNKNOWN;
    if (seconds === 0)
        return "0";
    if (seconds < 0.001)
        return `${digits(seconds * 1e6, significant)} µs`;
    if (seconds < 1)
        return `${digits(seconds * 1e3, significant)} ms`;
    if (seconds < 120)
        return `${digits(seconds, significant)} s`;
    return `${digits(seconds / 60, significant)} min`;
}
export function milliseconds(ms) {
    return ms === null || ms === undefined ? UNKNOWN : time(ms / 1000);
}
/** A rate per second. */
export function rate(value) {
    if (value === null)
        return UNKNOWN;
    if (value === 0)
        return "0";
    if (value < 10)
        return digits(value, 2);
    return count(Math.round(value));
}
export function percent(share) {
    if (share === null || !Number.isFinite(share))
        return UNKNOWN;
    const value = share * 100;
    return `${value !== 0 && value < 10 ? digits(value, 2) : Math.round(value)}%`;
}
/** The time of day, with tenths where things happen often. */
export function clock(unixMs, tenths = false) {
    const at = new Date(unixMs);
    const two = (value) => String(value).padStart(2, "0");
    const text = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
    return tenths ? `${text}.${Math.floor(at.getMilliseconds() / 100)}` : text;
}
/** How long something has run. */
export function span(ms) {
    const seconds = Math.max(0, Math.floor(ms / 1000));
    if (seconds < 60)
        return `${seconds} s`;
    const minutes = Math.floor(seconds / 60);
    if (minutes < 60)
        return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d`;
}
/** Host and port of a worker of the request plane (`tcp:10.0.0.7:4411/…`), where its address has them. */
export function planeHost(address) {
    return address?.match(/^(?:tcp|https?):(?:\/\/)?([^/]+:\d+)/)?.[1] ?? null;
}
/** A worker as people name it: its address, or its id where it has none; long ids are cut in the middle. */
export function workerName(worker, url) {
    const [id, rank] = worker.split("/");
    const many = rank === undefined || rank === "0" ? "" : ` rank ${rank}`;
    if (url)
        return url.replace(/^https?:\/\//, "").replace(/\/$/, "") + many;
    const short = (id ?? "").length > 10 ? `${id?.slice(0, 5)}…${id?.slice(-3)}` : id;
    return `worker ${short}${many}`;
}
