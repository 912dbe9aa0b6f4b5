// Before and after of a pass side by side: unchanged stretches folded, rows drawn as they come into sight.

import type { Box, Decision, Pass } from "./data";
import { type Child, h, replace, reveal, withCode } from "./dom";
import { bytes, integer, plural, signed, time } from "./format";
import type { Graphs, Row } from "./graphs";
import { lineElement } from "./tokens";

const CONTEXT = 3;
const SMALLEST_FOLD = 4;
const AT_ONCE = 120;
const OPENED_AT_ONCE = 400;

type Item = Row | { fold: Row[]; id: number };

const isFold = (item: Item): item is { fold: Row[]; id: number } => "fold" in item;

/** Rows with unchanged stretches folded, a few lines of context left on both sides of each change. */
export function folded(rows: Row[]): Item[] {
  const near = new Uint8Array(rows.length);
  rows.forEach((row, index) => {
    if (row.sign !== " ") near.fill(1, Math.max(0, index - CONTEXT), index + CONTEXT + 1);
  });
  const items: Item[] = [];
  for (let index = 0; index < rows.length; ) {
    if (near[index]) {
      items.push(rows[index++]);
      continue;
    }
    const start = index;
    while (index < rows.length && !near[index]) index++;
    const run = rows.slice(start, index);
    if (run.length < SMALLEST_FOLD) items.push(...run);
    else items.push({ fold: run, id: items.length });
  }
  return items;
}

const SIGNS: Record<string, [string, string]> = {
  " ": ["", ""],
  "-": ["−", ""],
  "+": ["", "+"],
  "~": ["−", "+"],
  moved: ["↕", "↕"],
};

export class DiffView {
  readonly element = h("main", { class: "panel-middle", tabindex: -1 });
  private head = h("div", { class: "pass-head" });
  private table = h("div", { class: "diff", role: "table" });
  private scroller = h("div", { class: "scroller" });
  private items: Item[] = [];
  /** Folds that are drawn and closed, by number. */
  private folds = new Map<number, Row[]>();
  private lastFold = 1e9;
  private drawn = 0;
  private graphs: Graphs | null = null;
  private single = false;
  private chosen = "";
  private observer: IntersectionObserver;
  private sentinel = h("div", { class: "sentinel" });

  constructor(private choose: (name: string, side: "left" | "right") => void) {
    this.scroller.append(this.head, this.table, this.sentinel);
    this.element.append(this.scroller);
    this.observer = new IntersectionObserver(
      (entries) => entries.some((entry) => entry.isIntersecting) && this.more(AT_ONCE),
      { root: this.scroller, rootMargin: "1200px" },
    );
    this.observer.observe(this.sentinel);
    this.table.addEventListener("click", (event) => this.clicked(event));
    this.table.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.clicked(event);
    });
  }

  /** What is known of a pass before its graphs are decoded. */
  showHead(pass: Pass, core: { backend: string }): void {
    replace(this.head, passHead(pass, core.backend));
    replace(this.table, pass.changed && h("p", { class: "empty" }, "reading the graphs …"));
    this.items = [];
    this.scroller.scrollTop = 0;
  }

  showPass(graphs: Graphs, rows: Row[]): void {
    this.graphs = graphs;
    this.single = false;
    const before = h("div", { class: "cell", role: "columnheader" }, "before");
    const after = h("div", { class: "cell", role: "columnheader" }, "after");
    replace(this.table, h("div", { class: "row heading", role: "row" }, before, after));
    this.start(folded(rows));
  }

  showGraph(graphs: Graphs, lines: number[], title: string, box: Box): void {
    this.graphs = graphs;
    this.single = true;
    const facts = `${plural(box.nodes, "node")}, ${plural(box.gemms ?? 0, "GEMM")}, ${bytes(box.bytes ?? 0)} read and written, about ${time(box.seconds ?? 0)} if each operation ran alone (estimated)`;
    replace(this.head, h("h2", {}, title), h("p", { class: "purpose" }, facts));
    replace(this.table);
    this.scroller.scrollTop = 0;
    this.start(lines.map((line) => ({ sign: " ", left: line, right: line })));
  }

  showText(title: string, ...children: Child[]): void {
    replace(this.head, h("h2", {}, title), children);
    replace(this.table);
    this.items = [];
  }

  mark(name: string): void {
    this.chosen = name;
    for (const cell of this.table.querySelectorAll<HTMLElement>(".cell[data-name]"))
      cell.classList.toggle("chosen", cell.dataset.name === name);
  }

  /** Bring a node into sight, opening the fold it is in. */
  goTo(name: string): void {
    const graphs = this.graphs;
    if (!graphs) return;
    const has = (row: Row): boolean =>
      (row.right >= 0 && graphs.name(row.right) === name) || (row.left >= 0 && graphs.name(row.left) === name);
    const at = this.items.findIndex((item) => (isFold(item) ? item.fold.some(has) : has(item)));
    if (at < 0) return;
    while (this.drawn <= at && this.drawn < this.items.length) this.more(AT_ONCE);
    for (const [id, rows] of this.folds)
      if (rows.some(has)) this.open(this.table.querySelector<HTMLElement>(`[data-fold="${id}"]`), has);
    this.mark(name);
    const cell = this.table.querySelector<HTMLElement>(".cell.chosen");
    if (cell) reveal(cell, this.scroller);
  }

  /** The next or the previous changed row below or above the one at the top. */
  nextChange(step: number): void {
    if (step > 0) this.more(AT_ONCE);
    const top = this.scroller.getBoundingClientRect().top + 60;
    const changed = [...this.table.querySelectorAll<HTMLElement>(".row[data-start]")];
    const target =
      step > 0
        ? changed.find((row) => row.getBoundingClientRect().top > top + 4)
        : changed.reverse().find((row) => row.getBoundingClientRect().top < top - 4);
    if (target) this.scroller.scrollTop += target.getBoundingClientRect().top - top;
  }

  private start(items: Item[]): void {
    this.items = items;
    this.folds.clear();
    this.drawn = 0;
    this.more(AT_ONCE);
  }

  private more(count: number): void {
    if (this.drawn >= this.items.length) return;
    const until = Math.min(this.items.length, this.drawn + count);
    const rows = document.createDocumentFragment();
    for (; this.drawn < until; this.drawn++) {
      const item = this.items[this.drawn];
      const before = this.items[this.drawn - 1];
      const starts = !isFold(item) && item.sign !== " " && (!before || isFold(before) || before.sign === " ");
      rows.append(isFold(item) ? this.fold(item.fold, item.id) : this.row(item, starts));
    }
    this.table.append(rows);
    // an observer says nothing while its target stays in sight
    this.observer.unobserve(this.sentinel);
    this.observer.observe(this.sentinel);
  }

  private row(row: Row, starts: boolean): HTMLElement {
    const graphs = this.graphs as Graphs;
    const cell = (line: number, other: number, side: "left" | "right", sign: string): HTMLElement =>
      line < 0
        ? h("div", { class: `cell ${side} nothing`, role: "cell" })
        : h(
            "div",
            {
              class: `cell ${side}${graphs.name(line) === this.chosen ? " chosen" : ""}`,
              role: "cell",
              tabindex: row.sign === " " && !this.single ? -1 : 0,
              "data-name": graphs.name(line),
              "data-side": side,
            },
            h("span", { class: "mark-sign" }, sign),
            lineElement(graphs, line, row.sign === "~" ? other : -1, side, this.single || (side === "right" && row.sign !== " ")),
          );
    const [leftSign, rightSign] = SIGNS[row.sign];
    if (this.single) return h("div", { class: "row single", role: "row" }, cell(row.right, -1, "right", ""));
    const kind = { " ": "same", "-": "removed", "+": "added", "~": "changed", moved: "moved" }[row.sign];
    const pair = row.sign === "~" && graphs.name(row.left) !== graphs.name(row.right) ? "replaced" : kind;
    return h(
      "div",
      { class: `row ${pair}`, role: "row", "data-start": starts },
      cell(row.left, row.right, "left", leftSign),
      cell(row.right, row.left, "right", rightSign),
    );
  }

  private fold(rows: Row[], id: number): HTMLElement {
    this.folds.set(id, rows);
    return h(
      "button",
      { type: "button", class: "fold", "data-fold": id, "aria-expanded": "false" },
      `⋯ ${plural(rows.length, "unchanged line")}`,
    );
  }

  /** Open a fold: all of it, or, where it is long, a part that has what is looked for. */
  private open(button: HTMLElement | null, wanted?: (row: Row) => boolean): void {
    const id = Number(button?.dataset.fold);
    const rows = this.folds.get(id);
    if (!button || !rows) return;
    this.folds.delete(id);
    const at = wanted ? rows.findIndex(wanted) : 0;
    const from = Math.max(0, Math.min(at - OPENED_AT_ONCE / 2, rows.length - OPENED_AT_ONCE));
    const rest = (part: Row[]): HTMLElement[] => (part.length ? [this.fold(part, ++this.lastFold)] : []);
    button.replaceWith(
      ...rest(rows.slice(0, from)),
      ...rows.slice(from, from + OPENED_AT_ONCE).map((row) => this.row(row, false)),
      ...rest(rows.slice(from + OPENED_AT_ONCE)),
    );
  }

  private clicked(event: globalThis.Event): void {
    const target = event.target as HTMLElement;
    const fold = target.closest<HTMLElement>(".fold");
    if (fold) {
      this.open(fold);
      return;
    }
    const cell = target.closest<HTMLElement>(".cell[data-name]");
    if (cell) this.choose(cell.dataset.name as string, cell.dataset.side as "left" | "right");
  }
}

function passHead(pass: Pass, backend: string): Child[] {
  const change = pass.change;
  const facts: Child[] = [
    h("span", {}, pass.place.replaceAll("_", "-")),
    h("span", {}, pass.changed ? `${integer(pass.before)} → ${integer(pass.after)} nodes` : `${integer(pass.after)} nodes, nothing changed`),
    pass.rewrites > 0 && backend !== "inductor" && h("span", {}, plural(pass.rewrites, "rewrite")),
    change.gemms ? h("span", {}, `${signed(change.gemms, integer)} GEMMs`) : null,
    change.bytes ? h("span", { title: "estimated, as if each operation ran alone" }, `${signed(change.bytes, bytes)} moved (estimated)`) : null,
    h("span", { title: "time this pass took while compiling" }, `ran ${time(pass.seconds)}`),
  ];
  const declined = pass.declines.reduce((sum, one) => sum + one.count, 0);
  return [
    h("h2", {}, pass.name, pass.effect && h("span", { class: `tag effect-${pass.effect}` }, pass.effect)),
    pass.purpose && h("p", { class: "purpose" }, withCode(pass.purpose)),
    h("p", { class: "facts" }, facts),
    pass.note && h("p", { class: "note" }, pass.note),
    pass.error && h("details", { class: "error", open: true }, h("summary", {}, "error"), h("pre", {}, pass.error)),
    pass.fired.length > 0 &&
      backend !== "inductor" &&
      h(
        "ul",
        { class: "rules", "aria-label": "Rules that fired" },
        pass.fired.map(([rule, times, formula, effect]) =>
          h("li", {}, h("b", {}, `${integer(times)} ×`), " ", h("code", { class: `effect-${effect}` }, rule), formula && h("span", { class: "formula" }, formula)),
        ),
      ),
    pass.decisions.length > 0 && decisions(pass.decisions),
    declined > 0 &&
      h(
        "details",
        { class: "declines", open: !pass.changed },
        h("summary", {}, `${plural(declined, "site")} declined`),
        h(
          "ul",
          {},
          pass.declines.map(({ rule, reason, count, sites }) =>
            h(
              "li",
              {},
              h("b", {}, `${integer(count)} ×`), " ", h("code", {}, rule), ": ", reason,
              h("span", { class: "sites" }, " at ", sites.slice(0, 4).map(([node, source], index) => [index ? ", " : "", node, source && ` (${source})`]), count > 4 && " …"),
            ),
          ),
        ),
      ),
  ];
}

function decisions(list: Decision[]): HTMLElement {
  const best = [...list].sort((a, b) => a.after - a.before - (b.after - b.before));
  return h(
    "details",
    { class: "decisions" },
    h("summary", {}, `${plural(list.length, "decision")} of the cost model`),
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ["rule", "node", "before", "after", ""].map((name) => h("th", {}, name)))),
      h(
        "tbody",
        {},
        best.slice(0, 40).map((one) =>
          h("tr", {}, h("td", {}, one.rule), h("td", {}, one.node), h("td", {}, time(one.before)), h("td", {}, time(one.after)), h("td", {}, one.source)),
        ),
      ),
    ),
  );
}
