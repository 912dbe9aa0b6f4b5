// Two compiles of one model side by side: figures, the size of the graph at each point of the flow, the passes that
// changed something, and the graphs that code generation got.

import type { Comparison, Core, Figure, Pass, Size } from "./data";
import { breakable, h, replace, type Child } from "./dom";
import { atLeast, bytes, integer, percent, plural, time } from "./format";

const CONTEXT = 2;
const ROWS_AT_ONCE = 400;

type Row = [sign: string, left: string, right: string];

const show = (unit: string, value: number): string =>
  unit === "bytes" ? bytes(value) : unit === "seconds" ? time(value) : integer(value);

/** How much less or more the first is than the second. */
function difference(ours: number, theirs: number): Child {
  if (ours === theirs) return "=";
  if (!theirs) return "";
  const share = ours / theirs;
  const text = share >= 2 || share <= 0.5 ? `${share < 1 ? `${(1 / share).toFixed(1)}× less` : `${share.toFixed(1)}× more`}` : `${share < 1 ? "−" : "+"}${percent(Math.abs(share - 1))}`;
  return h("span", { class: ours < theirs ? "less" : "more" }, text);
}

export class Compare {
  readonly element = h("div", { class: "compare", tabindex: -1 });

  /** `go` opens a pass in the report that it is of. */
  show(comparison: Comparison, cores: [Core, Core], program: number, go: (report: number, pass: number) => void): void {
    const names = comparison.backends;
    const one = comparison.programs[program - 1];
    replace(
      this.element,
      h(
        "div",
        { class: "tables" },
        h("section", {}, h("h2", {}, "In all"), this.figures(comparison, names)),
        one && h("section", {}, h("h2", {}, "At each point of the flow"), stages(one.stages, names)),
      ),
      h("p", { class: "rest" }, `Bytes, and times marked ≈, are estimates by one model of the device for both: they do not say which of the two is faster. Times without the mark are measured. Of the times to compile, ${names[0]}'s comes first, and pays for what is done once in a process.`),
      h("section", { class: "both" }, h("h2", {}, "Passes that changed something"), h("div", { class: "sides" }, cores.map((core, report) => passes(core, names[report], program, (pass) => go(report, pass))))),
      one?.graphs.map(({ graph, rows }) => finalGraph(graph, rows as Row[], names)),
      !one && h("p", { class: "empty" }, "The other compiler did not capture this program."),
    );
    this.element.scrollTop = 0;
  }

  private figures(comparison: Comparison, names: string[]): HTMLElement {
    return table(
      ["", ...names, ""],
      comparison.figures.map((figure) => [figure[0], shown(figure, 0), shown(figure, 1), comparable(figure)]),
      "figures",
    );
  }
}

function shown([, unit, ours, theirs, unknown]: Figure, side: 0 | 1): Child {
  const text = atLeast([ours, theirs][side], unknown[side], (value) => show(unit, value));
  return unknown[side] ? [text, h("div", { class: "unknown" }, `${plural(unknown[side], "launch", "launches")} unknown`)] : text;
}

/** An estimated time says nothing about which of the two is faster, and neither does a sum that leaves something out. */
function comparable([what, , ours, theirs, unknown, comparable]: Figure): Child {
  if (!comparable || what.startsWith("passes") || ours === null || theirs === null || unknown[0] || unknown[1]) return "";
  return difference(ours, theirs);
}

function table(heads: string[], rows: Child[][], kind: string): HTMLElement {
  return h(
    "table",
    { class: kind },
    h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, rows.map(([first, ...cells]) => h("tr", {}, h("th", { scope: "row" }, first), cells.map((cell) => h("td", {}, cell))))),
  );
}

function stages(list: [string, string, Size | null, Size | null][], names: string[]): HTMLElement {
  const one = (size: Size | null, what: "nodes" | "gemms" | "bytes" | "seconds", unit: string): Child => {
    if (!size) return "–";
    if (what === "seconds" && size.measured != null) return h("span", { title: "measured" }, time(size.measured));
    const text = atLeast(size[what], what === "nodes" ? 0 : size.unknown, (value) => show(unit, value));
    return what === "seconds" ? `≈ ${text}` : text;
  };
  const pair = (ours: Size | null, theirs: Size | null, what: "nodes" | "gemms" | "bytes" | "seconds", unit: string): Child[] =>
    [ours, theirs].map((size) => one(size, what, unit));
  const columns: ["nodes" | "gemms" | "bytes" | "seconds", string, string][] = [["nodes", "", "nodes"], ["gemms", "", "GEMMs"], ["bytes", "bytes", "bytes"], ["seconds", "seconds", "time"]];
  return h(
    "table",
    { class: "stages" },
    h(
      "thead",
      {},
      h("tr", {}, h("th", {}), columns.map(([, , label]) => h("th", { colspan: 2, scope: "colgroup" }, label))),
      h("tr", {}, h("th", {}), columns.map(() => names.map((name) => h("th", { scope: "col" }, name)))),
    ),
    h(
      "tbody",
      {},
      list.map(([label, side, ours, theirs]) =>
        h("tr", {},
          h("th", { scope: "row" }, label === "code generation" ? "kernels" : label, side && h("span", { class: "side" }, ` ${side}`)),
          columns.map(([what, unit]) => pair(ours, theirs, what, unit).map((cell, index) => h("td", { class: index ? "theirs" : "ours" }, cell)))),
      ),
    ),
  );
}

function passes(core: Core, name: string, program: number, go: (pass: number) => void): HTMLElement {
  const rows: Child[] = [];
  let place = "";
  core.passes.forEach((pass, number) => {
    if (pass.program !== program || !pass.changed) return;
    if (pass.place !== place) rows.push(h("h4", {}, (place = pass.place).replaceAll("_", "-")));
    rows.push(passRow(pass, core.backend, () => go(number)));
  });
  const quiet = core.passes.filter((pass) => pass.program === program && !pass.changed).length;
  return h(
    "div",
    {},
    h("h3", {}, name),
    rows.length ? rows : h("p", { class: "empty" }, "None."),
    h("p", { class: "rest" }, `${plural(quiet, "more pass", "more passes")} changed nothing`),
  );
}

function passRow(pass: Pass, backend: string, go: () => void): HTMLElement {
  const fired = backend === "inductor" ? "" : pass.fired.map(([rule, times]) => `${integer(times)} × ${rule}`).join(", ");
  return h(
    "button",
    { type: "button", class: `compared-pass effect-${pass.effect || "none"}`, title: pass.purpose, onclick: go },
    h("span", { class: "sign" }, "●"),
    h("span", { class: "pass-name" }, breakable(pass.name)),
    h("span", { class: "count" }, pass.before === pass.after ? integer(pass.after) : `${integer(pass.before)} → ${integer(pass.after)}`, " nodes"),
    h("span", { class: "time" }, time(pass.seconds)),
    fired && h("span", { class: "fired" }, fired),
  );
}

function finalGraph(graph: string, rows: Row[], names: string[]): HTMLElement {
  const differ = rows.filter(([sign]) => sign !== " ").length;
  const body = h("div", { class: "diff", role: "table", "aria-label": `The final ${graph} graphs` });
  body.append(h("div", { class: "row heading", role: "row" }, names.map((name) => h("div", { class: "cell", role: "columnheader" }, name))));
  const items = folded(rows);
  let drawn = 0;
  const more = (): void => {
    const until = Math.min(items.length, drawn + ROWS_AT_ONCE);
    for (; drawn < until; drawn++) body.append(...items[drawn]());
    if (drawn < items.length)
      body.append(h("button", { type: "button", class: "fold", onclick: (event: Event) => { (event.target as HTMLElement).remove(); more(); } }, `⋯ ${integer(items.length - drawn)} more rows`));
  };
  more();
  const count = (sign: string): number => rows.filter(([one]) => one === sign).length;
  const what = differ
    ? `${plural(count(" "), "operation")} in both, ${integer(count("-"))} only in ${names[0]}'s, ${integer(count("+"))} only in ${names[1]}'s. Rows pair equal operations on values of equal types; names of nodes differ.`
    : "Both have the same operations on values of the same types.";
  return h("section", { class: "both" }, h("h2", {}, `The ${graph} graph that code generation gets`), h("p", { class: "rest" }, what), body);
}

/** Rows, with long runs of equal ones behind a button. */
function folded(rows: Row[]): (() => HTMLElement[])[] {
  const near = new Set<number>();
  rows.forEach(([sign], index) => {
    if (sign !== " ") for (let k = index - CONTEXT; k <= index + CONTEXT; k++) near.add(k);
  });
  const result: (() => HTMLElement[])[] = [];
  for (let index = 0; index < rows.length; ) {
    if (near.has(index)) {
      const row = rows[index++];
      result.push(() => [rowElement(row)]);
      continue;
    }
    const from = index;
    while (index < rows.length && !near.has(index)) index++;
    const hidden = rows.slice(from, index);
    result.push(() => (hidden.length < 3 ? hidden.map(rowElement) : [fold(hidden)]));
  }
  return result;
}

function fold(hidden: Row[]): HTMLElement {
  const button = h("button", { type: "button", class: "fold", "aria-expanded": "false", onclick: () => button.replaceWith(...hidden.map(rowElement)) }, `⋯ ${plural(hidden.length, "equal line")}`);
  return button;
}

function rowElement([sign, left, right]: Row): HTMLElement {
  const kind = sign === " " ? "same" : sign === "-" ? "removed" : "added";
  const cell = (text: string, side: string): HTMLElement =>
    h("div", { class: `cell ${side}${text ? "" : " nothing"}`, role: "cell" }, text && h("span", { class: "line" }, named(text)));
  return h("div", { class: `row ${kind}`, role: "row" }, cell(left, "left"), cell(right, "right"));
}

/** A line of a listing, with the name that it defines set off. */
function named(text: string): Child[] {
  const end = text.search(/[: ]/);
  return end > 0 && !text.startsWith("return ") ? [h("span", { class: "name" }, text.slice(0, end)), text.slice(end)] : [text];
}
