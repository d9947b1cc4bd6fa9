// How are elements made and changed? Text is only ever set as text: no markup of anybody else's reaches the page.

export type Child = Node | string | null | false;
type Props = Readonly<Record<string, string | number | boolean | ((event: Event) => void)>>;

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes; a property that begins with `on` is a listener. */
export function el<K extends keyof HTMLElementTagNameMap>(tag: K, props: Props = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  set(made, props);
  add(made, children);
  return made;
}

export function svg(tag: string, props: Props = {}, ...children: Child[]): SVGElement {
  const made = document.createElementNS(SVG, tag);
  set(made, props);
  add(made, children);
  return made;
}

function set(element: Element, props: Props): void {
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false) element.setAttribute(name, String(value));
  }
}

function add(element: Element, children: readonly Child[]): void {
  for (const child of children) {
    if (child !== null && child !== false) element.append(child);
  }
}

/** Writes a text, if it is another: what does not change costs no layout. */
export function write(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

/** Writes an attribute, if it is another. */
export function mark(element: Element, name: string, value: string | null): void {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** The element with this id, which the page has. */
export function byId<T extends HTMLElement>(id: string, kind: new () => T): T {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`the page has no #${id}`);
  return found;
}

export function button(label: string, act: () => void, kind = ""): HTMLButtonElement {
  return el("button", { type: "button", class: kind, onclick: act }, label);
}

/** A card with a heading. */
export function card(title: string, ...children: Child[]): HTMLElement {
  return el("section", { class: "card" }, el("h2", {}, title), ...children);
}

/** A cell that says how full something is: the figure, and a bar below it for a share from 0 to 1. */
export class Meter {
  readonly root = el("div", { class: "meter" });
  private readonly figure = el("span", { class: "figure" });
  private readonly bar = el("span", { class: "fill" });
  private readonly track = el("span", { class: "track", "aria-hidden": "true" }, this.bar);

  constructor() {
    this.root.append(this.figure, this.track);
  }

  set(text: string, share: number | null): void {
    write(this.figure, text);
    this.track.hidden = share === null;
    const width = `${Math.round(Math.min(1, Math.max(0, share ?? 0)) * 100)}%`;
    if (this.bar.style.width !== width) this.bar.style.width = width;
    mark(this.bar, "data-full", share !== null && share >= 0.9 ? "yes" : "no");
  }
}

/** Keeps the children of a parent in the order of keys, making, updating and removing one element for each. */
export class Keyed<T, E extends { root: Element }> {
  private readonly made = new Map<string, E>();

  constructor(
    private readonly parent: Element,
    private readonly make: (item: T) => E,
    private readonly update: (element: E, item: T) => void,
  ) {}

  show(items: readonly (readonly [string, T])[]): void {
    const kept = new Set<string>();
    let at = this.parent.firstElementChild;
    for (const [key, item] of items) {
      kept.add(key);
      let element = this.made.get(key);
      if (element === undefined) {
        element = this.make(item);
        this.made.set(key, element);
      }
      this.update(element, item);
      if (element.root === at) at = at.nextElementSibling;
      else this.parent.insertBefore(element.root, at);
    }
    for (const [key, element] of this.made) {
      if (!kept.has(key)) {
        element.root.remove();
        this.made.delete(key);
      }
    }
  }
}
