// How are elements made and changed? Text is only ever set as text: no markup of anybody else's reaches the page.
const SVG = "http://www.w3.org/2000/svg";
/** An element with attributes; a property that begins with `on` is a listener. */
export function el(tag, props = {}, ...children) {
    const made = document.createElement(tag);
    set(made, props);
    add(made, children);
    return made;
}
export function svg(tag, props = {}, ...children) {
    const made = document.createElementNS(SVG, tag);
    set(made, props);
    add(made, children);
    return made;
}
function set(element, props) {
    for (const [name, value] of Object.entries(props)) {
        if (typeof value === "function")
            element.addEventListener(name.slice(2), value);
        else if (value === true)
            element.setAttribute(name, "");
        else if (value !== false)
            element.setAttribute(name, String(value));
    }
}
function add(element, children) {
    for (const child of children) {
        if (child !== null && child !== false)
            element.append(child);
    }
}
/** Writes a text, if it is another: what does not change costs no layout. */
export function write(element, text) {
    if (element.textContent !== text)
        element.textContent = text;
}
/** Writes an attribute, if it is another. */
export function mark(element, name, value) {
    if (value === null)
        element.removeAttribute(name);
    else if (element.getAttribute(name) !== value)
        element.setAttribute(name, value);
}
/** The element with this id, which the page has. */
export function byId(id, kind) {
    const found = document.getElementById(id);
    if (!(found instanceof kind))
        throw new Error(`the page has no #${id}`);
    return found;
}
export function button(label, act, kind = "") {
    return el("button", { type: "button", class: kind, onclick: act }, label);
}
/** A card with a heading. */
export function card(title, ...children) {
    return el("section", { class: "card" }, el("h2", {}, title), ...children);
}
/** A cell that says how full something is: the figure, and a bar below it for a share from 0 to 1. */
export class Meter {
    root = el("div", { class: "meter" });
    figure = el("span", { class: "figure" });
    bar = el("span", { class: "fill" });
    track = el("span", { class: "track", "aria-hidden": "true" }, this.bar);
    constructor() {
        this.root.append(this.figure, this.track);
    }
    set(text, share) {
        write(this.figure, text);
        this.track.hidden = share === null;
        const width = `${Math.round(Math.min(1, Math.max(0, share ?? 0)) * 100)}%`;
        if (this.bar.style.width !== width)
            this.bar.style.width = width;
        mark(this.bar, "data-full", share !== null && share >= 0.9 ? "yes" : "no");
    }
}
/** Keeps the children of a parent in the order of keys, making, updating and removing one element for each. */
export class Keyed {
    parent;
    make;
    update;
    made = new Map();
    constructor(parent, make, update) {
        this.parent = parent;
        this.make = make;
        this.update = update;
    }
    show(items) {
        const kept = new Set();
        let at = this.parent.firstElementChild;
        for (const [key, item] of items) {
            kept.add(key);
            let element = this.made.get(key);
            if (element === undefined) {
                element = this.make(item);
                this.made.set(key, element);
            }
            this.update(element, item);
            if (element.root === at)
                at = at.nextElementSibling;
            else
                this.parent.insertBefore(element.root, at);
        }
        for (const [key, element] of this.made) {
            if (!kept.has(key)) {
                element.root.remove();
                this.made.delete(key);
            }
        }
    }
}
