// All passes in the order in which they ran, with what each did; a search, and a filter for those that changed something.

import type { Pass } from "./data";
import { breakable, h, replace, reveal } from "./dom";
import { integer, time } from "./format";

export class PassList {
  readonly element: HTMLElement;
  readonly search: HTMLInputElement;
  private list: HTMLElement;
  private onlyChanged: HTMLInputElement;
  private status: HTMLElement;
  private rows = new Map<number, HTMLElement>();
  private order: number[] = [];
  private passes: Pass[] = [];
  private texts: string[] = [];
  private program = 1;
  current = -1;
  /** Nodes that a search finds, once the graphs are decoded. */
  findNodes: (words: string[]) => { name: string; where: string; text: string; go: () => void }[] = () => [];

  constructor(private choose: (pass: number) => void) {
    this.search = h("input", { type: "search", placeholder: "search passes, nodes", title: "Passes, rules, reasons to decline, nodes (/)", "aria-label": "Search passes" });
    this.search.addEventListener("input", () => this.draw());
    this.search.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        this.search.value = "";
        this.draw();
        this.list.focus();
      } else if (event.key === "Enter" || event.key === "ArrowDown") {
        event.preventDefault();
        this.list.focus();
        if (this.order.length && !this.order.includes(this.current)) this.choose(this.order[0]);
      }
    });
    this.onlyChanged = h("input", { type: "checkbox", checked: true, id: "only-changed" });
    this.onlyChanged.addEventListener("change", () => this.draw());
    this.status = h("span", { class: "status", role: "status" });
    this.list = h("div", { class: "passes", role: "listbox", tabindex: 0, "aria-label": "Passes" });
    this.list.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown") this.move(1);
      else if (event.key === "ArrowUp") this.move(-1);
      else return;
      event.preventDefault();
    });
    this.element = h(
      "nav",
      { class: "panel-left", "aria-label": "Passes" },
      h("div", { class: "filters" }, this.search, h("label", {}, this.onlyChanged, " changed only"), this.status),
      this.list,
    );
  }

  show(passes: Pass[], program: number): void {
    this.passes = passes;
    this.program = program;
    this.texts = passes.map((pass) =>
      [
        pass.name, pass.purpose, pass.place, pass.note, pass.effect,
        ...pass.fired.flatMap(([rule, , formula]) => [rule, formula]),
        ...pass.declines.flatMap((decline) => [decline.rule, decline.reason, ...decline.sites.flat()]),
      ].join("\n").toLowerCase(),
    );
    this.draw();
  }

  toggleChanged(): void {
    this.onlyChanged.checked = !this.onlyChanged.checked;
    this.draw();
  }

  /** Mark a pass as the one that is shown; bring it into the list if a filter hides it. */
  mark(pass: number): void {
    this.current = pass;
    if (pass >= 0 && !this.order.includes(pass)) {
      this.search.value = "";
      if (!this.passes[pass].changed) this.onlyChanged.checked = false;
      this.draw();
    }
    for (const [number, row] of this.rows) row.setAttribute("aria-selected", String(number === pass));
    const row = this.rows.get(pass);
    if (row) this.list.setAttribute("aria-activedescendant", row.id);
    this.revealCurrent();
  }

  /** Scroll to the pass that is shown, below the title of its stage. */
  revealCurrent(): void {
    const row = this.rows.get(this.current);
    const title = row?.parentElement?.querySelector<HTMLElement>("h3");
    if (row) reveal(row, this.list, title?.offsetHeight);
  }

  move(step: number): void {
    if (!this.order.length) return;
    const at = this.order.indexOf(this.current);
    this.choose(this.order[at < 0 ? 0 : Math.max(0, Math.min(this.order.length - 1, at + step))]);
  }

  first(passes: number[]): number {
    return passes.find((number) => this.passes[number].changed) ?? -1;
  }

  reveal(place: string): void {
    const head = [...this.list.querySelectorAll<HTMLElement>("h3")].find((one) => one.dataset.place === place);
    if (head) this.list.scrollTop += head.getBoundingClientRect().top - this.list.getBoundingClientRect().top;
  }

  private draw(): void {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.rows.clear();
    this.order = [];
    const children: HTMLElement[] = [];
    let place = "";
    let group: HTMLElement | null = null;
    this.passes.forEach((pass, number) => {
      if (pass.program !== this.program) return;
      // a search looks at all passes: what it asks for may be why one of them changed nothing
      if (words.length ? !words.every((word) => this.texts[number].includes(word)) : this.onlyChanged.checked && !pass.changed && !pass.error) return;
      if (pass.place !== place || !group) {
        place = pass.place;
        group = h("div", { role: "group", "aria-label": place }, h("h3", { "data-place": place }, place.replaceAll("_", "-")));
        children.push(group);
      }
      const row = this.row(pass, number);
      this.rows.set(number, row);
      this.order.push(number);
      group.append(row);
    });
    const total = this.passes.filter((pass) => pass.program === this.program).length;
    replace(this.status, `${this.order.length} of ${total}`);
    const nodes = words.length ? this.findNodes(words) : [];
    if (nodes.length) {
      const hits = nodes.map(({ name, where, text, go }) =>
        h("div", { class: "pass hit", title: text, role: "option", tabindex: 0, onclick: go, onkeydown: (event: KeyboardEvent) => event.key === "Enter" && go() },
          h("span", { class: "sign" }, "▪"), h("span", { class: "pass-name" }, breakable(name)), h("span", { class: "nodes" }), h("span", { class: "what" }, where)),
      );
      children.push(h("div", { role: "group", "aria-label": "nodes" }, h("h3", {}, "nodes"), hits));
    }
    replace(this.list, children.length ? children : h("p", { class: "empty" }, "No pass fits."));
    for (const [number, row] of this.rows) row.setAttribute("aria-selected", String(number === this.current));
  }

  private row(pass: Pass, number: number): HTMLElement {
    const state = pass.error ? "failed" : pass.changed ? "changed" : "same";
    const sign = { failed: "✗", changed: "●", same: "○" }[state];
    const difference = pass.after - pass.before;
    const nodes = difference ? (difference > 0 ? "+" : "−") + integer(Math.abs(difference)) : "";
    return h(
      "div",
      {
        class: `pass ${state} effect-${pass.effect || "none"}`,
        id: `pass-${number}`,
        role: "option",
        "aria-selected": "false",
        title: pass.purpose,
        onclick: () => this.choose(number),
      },
      h("span", { class: "sign", "aria-label": state }, sign),
      h("span", { class: "pass-name" }, breakable(pass.name)),
      h("span", { class: "nodes", title: "nodes" }, nodes),
      h("span", { class: "what" }, this.what(pass)),
      h("span", { class: "time" }, time(pass.seconds)),
    );
  }

  private what(pass: Pass): string {
    const parts = [];
    if (pass.rewrites && pass.effect) parts.push(`${integer(pass.rewrites)} × ${pass.effect}`);
    const declined = pass.declines.reduce((sum, one) => sum + one.count, 0);
    if (declined) parts.push(`${integer(declined)} declined`);
    return parts.join(" · ");
  }
}
