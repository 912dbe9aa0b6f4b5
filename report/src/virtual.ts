// A list of any length of which only the rows in sight exist; all rows have one height.

import { h } from "./dom";

const MARGIN = 12;

export class VirtualList {
  readonly element: HTMLElement;
  private body: HTMLElement;
  private shown = new Map<number, HTMLElement>();
  private count = 0;
  /** The row that has the keyboard. */
  active = 0;

  constructor(
    private rowHeight: number,
    private label: string,
    private draw: (index: number) => HTMLElement,
    private choose: (index: number) => void,
  ) {
    this.body = h("div", { class: "virtual-body" });
    this.element = h("div", { class: "virtual", role: "listbox", tabindex: 0, "aria-label": label }, this.body);
    this.element.addEventListener("scroll", () => this.refresh(), { passive: true });
    this.element.addEventListener("keydown", (event) => this.key(event as KeyboardEvent));
    new ResizeObserver(() => this.refresh()).observe(this.element);
  }

  reset(count: number): void {
    this.count = count;
    this.active = Math.min(this.active, Math.max(count - 1, 0));
    this.body.style.height = `${count * this.rowHeight}px`;
    this.redraw();
  }

  /** Draw the rows in sight anew, where what they show has changed. */
  redraw(): void {
    this.shown.clear();
    this.body.replaceChildren();
    this.refresh();
  }

  reveal(index: number): void {
    if (index < 0) return;
    const top = index * this.rowHeight;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop || top + this.rowHeight > scrollTop + clientHeight)
      this.element.scrollTop = Math.max(0, top - clientHeight / 3);
    this.active = index;
    this.element.setAttribute("aria-activedescendant", this.rowId(index));
  }

  private rowId = (index: number): string => `${this.label.replaceAll(" ", "-")}-${index}`;

  private refresh(): void {
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.rowHeight) - MARGIN);
    const height = this.element.clientHeight || 600;
    const last = Math.min(this.count, first + Math.ceil(height / this.rowHeight) + 2 * MARGIN);
    for (const [index, row] of this.shown)
      if (index < first || index >= last) {
        row.remove();
        this.shown.delete(index);
      }
    for (let index = first; index < last; index++) {
      if (this.shown.has(index)) continue;
      const row = this.draw(index);
      row.style.top = `${index * this.rowHeight}px`;
      row.id = this.rowId(index);
      row.setAttribute("role", "option");
      row.setAttribute("aria-posinset", String(index + 1));
      row.setAttribute("aria-setsize", String(this.count));
      row.addEventListener("click", () => {
        this.active = index;
        this.choose(index);
      });
      this.shown.set(index, row);
      this.body.append(row);
    }
  }

  private key(event: KeyboardEvent): void {
    const step = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 20, PageUp: -20 }[event.key];
    if (step) this.active = Math.max(0, Math.min(this.count - 1, this.active + step));
    else if (event.key === "Home") this.active = 0;
    else if (event.key === "End") this.active = this.count - 1;
    else if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    this.reveal(this.active);
    if (this.count) this.choose(this.active);
  }
}
