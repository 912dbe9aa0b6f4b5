// Elements from data. Strings become text nodes, never markup: whatever a name or a source line holds is shown as it is.

export type Child = Node | string | number | null | undefined | false | Child[];
type Properties = Record<string, unknown>;

function append(parent: Node, children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(parent, child);
    else parent.appendChild(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

function configure(element: Element, properties: Properties): void {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value as EventListener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  properties: Properties = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  configure(element, properties);
  append(element, children);
  return element;
}

export function svg(tag: string, properties: Properties = {}, ...children: Child[]): SVGElement {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  configure(element, properties);
  append(element, children);
  return element;
}

/** A name that may be broken after its underscores and dots. */
export const breakable = (name: string): Child[] =>
  name.split(/(?<=[_.])/).flatMap((piece, index) => (index ? [document.createElement("wbr"), piece] : [piece]));

export function replace(parent: Element, ...children: Child[]): void {
  parent.replaceChildren();
  append(parent, children);
}

/** A text with parts `like this`, as docstrings have them: those parts as code. */
export const withCode = (text: string): Child[] =>
  text.split(/`([^`]+)`/).map((piece, index) => (index % 2 ? h("code", {}, piece) : piece));

/** Scroll inside one container only; scrollIntoView would move the page as well. `head` is what sticks to its top. */
export function reveal(element: HTMLElement, container: HTMLElement, head = 0): void {
  const inner = element.getBoundingClientRect();
  const outer = container.getBoundingClientRect();
  if (!outer.height) return;  // not on the screen
  if (inner.top < outer.top + head || inner.bottom > outer.bottom)
    container.scrollTop += inner.top - outer.top - outer.height / 3;
}
