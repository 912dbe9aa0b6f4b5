// Three linked columns: the user's source, the nodes it became, and the kernels that compute them.

import type { KernelData } from "./data";
import { h, replace } from "./dom";
import { integer, known, plural, time } from "./format";
import type { Graphs } from "./graphs";
import { highlighted } from "./highlight";
import { type Linked, Links, lineKey } from "./links";
import { VirtualList } from "./virtual";

const ROW = 22;
const SHOWN_KERNELS = 12;

type Choice = { kind: "line"; file: number; line: number } | { kind: "node" | "call"; number: number };

const same = (a: Choice | null, b: Choice): boolean => JSON.stringify(a) === JSON.stringify(b);

export class Columns {
  readonly element = h("div", { class: "columns" });
  private links: Links | null = null;
  private files = h("select", { "aria-label": "Source file" });
  private file = 0;
  private pinned: Choice | null = null;
  private linked: Linked | null = null;
  private hovered: Linked | null = null;
  private nodeRows: number[] = [];
  private callRows: number[] = [];
  private only = h("input", { type: "checkbox", checked: true, id: "only-linked" });
  private heads = { source: h("span", { class: "status" }), nodes: h("span", { class: "status" }), kernels: h("span", { class: "status" }) };
  private code = h("div", { class: "kernel-code", tabindex: 0, role: "region", "aria-label": "Kernel source" });
  private source: VirtualList;
  private nodes: VirtualList;
  private kernels: VirtualList;

  constructor(private showNode: (listing: number, version: number, name: string) => void) {
    this.source = new VirtualList(ROW, "Source lines", (index) => this.sourceRow(index), (index) => this.pick(this.lineAt(index)));
    this.nodes = new VirtualList(ROW, "Nodes", (index) => this.nodeRow(index), (index) => this.pick({ kind: "node", number: this.nodeRows[index] }));
    this.kernels = new VirtualList(ROW, "Kernels", (index) => this.callRow(index), (index) => this.pick({ kind: "call", number: this.callRows[index] }));
    this.files.addEventListener("change", () => this.openFile(Number(this.files.value)));
    this.only.addEventListener("change", () => this.filter());
    this.element.append(
      h("section", { class: "column source-column" }, h("header", {}, h("h2", {}, "Your source"), this.files, this.heads.source), this.source.element),
      h(
        "section",
        { class: "column node-column" },
        h("header", {}, h("h2", {}, "Nodes"), this.heads.nodes, h("label", {}, this.only, " linked only")),
        this.nodes.element,
      ),
      h("section", { class: "column kernel-column" }, h("header", {}, h("h2", {}, "Kernels"), this.heads.kernels), this.kernels.element, this.code),
    );
    this.element.addEventListener("mouseover", (event) => this.hover(event.target as HTMLElement));
    this.element.addEventListener("mouseleave", () => this.setHover(null));
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.pick(null);
    });
  }

  show(graphs: Graphs, kernels: KernelData, program: number): void {
    if (this.links?.graphs === graphs && this.links.program === program) return;
    this.links = new Links(graphs, kernels, program);
    const counts = graphs.data.files.map((file, number) => file.numbers.reduce((sum, line) => sum + (this.links as Links).count(number, line), 0));
    const installed = (number: number): number => Number(graphs.data.files[number].installed);
    // a file of the reader's own before those of packages, then the one with most nodes
    const order = counts.map((_, number) => number).sort((a, b) => Number(!counts[a]) - Number(!counts[b]) || installed(a) - installed(b) || counts[b] - counts[a]);
    replace(this.files, order.map((number) => h("option", { value: number }, `${graphs.data.files[number].path} (${integer(counts[number])})`)));
    this.pinned = this.linked = this.hovered = null;
    this.openFile(order[0] ?? -1);
    this.filter();
  }

  openFile(file: number): void {
    this.file = file;
    this.files.value = String(file);
    const lines = this.links?.graphs.data.files[file]?.numbers ?? [];
    this.source.reset(lines.length);
    const first = lines.findIndex((line) => this.links?.isLinked(file, line));
    if (first > 0) this.source.reveal(first);
  }

  pinLine(file: number, line: number): void {
    if (file !== this.file) this.openFile(file);
    this.pinned = null;
    this.pick({ kind: "line", file, line });
  }

  pinCall(call: number): void {
    this.pinned = null;
    this.pick({ kind: "call", number: call });
  }

  private linkedOf(choice: Choice | null): Linked | null {
    const links = this.links;
    if (!choice || !links) return null;
    if (choice.kind === "line") return links.ofLine(choice.file, choice.line);
    return choice.kind === "node" ? links.ofNode(choice.number) : links.ofCall(choice.number);
  }

  private pick(choice: Choice | null): void {
    this.pinned = choice && same(this.pinned, choice) ? null : choice;
    this.linked = this.linkedOf(this.pinned);
    this.hovered = null;
    this.filter();
    const linked = this.linked;
    const links = this.links;
    if (!linked || !links) return;
    // bring the first of what belongs together into sight, in the two other columns
    const lines = [...linked.lines].map((key) => key.split(":").map(Number));
    if (lines.length && !lines.some(([file]) => file === this.file)) this.openFile(lines[0][0]);
    const numbers = links.graphs.data.files[this.file]?.numbers ?? [];
    const here = lines.filter(([file]) => file === this.file).map(([, line]) => numbers.indexOf(line));
    if (here.length) this.source.reveal(Math.min(...here));
    this.nodes.reveal(this.nodeRows.findIndex((node) => linked.nodes.has(node)));
    this.kernels.reveal(this.callRows.findIndex((call) => linked.calls.has(call)));
    this.redraw();
  }

  private filter(): void {
    const links = this.links;
    if (!links) return;
    const linked = this.only.checked ? this.linked : null;
    const all = links.nodes.map((_, index) => index);
    // a choice in a column does not shorten that column: the next row can be chosen from it
    this.nodeRows = linked && this.pinned?.kind !== "node" ? all.filter((node) => linked.nodes.has(node)) : all;
    this.callRows = linked && this.pinned?.kind !== "call" ? links.calls.filter((call) => linked.calls.has(call)) : links.calls;
    this.nodes.reset(this.nodeRows.length);
    this.kernels.reset(this.callRows.length);
    const some = (shown: number | undefined, total: number): string => (shown === undefined ? integer(total) : `${integer(shown)} of ${integer(total)}`);
    replace(this.heads.nodes, some(this.linked?.nodes.size, links.nodes.length));
    replace(this.heads.kernels, some(this.linked?.calls.size, links.calls.length));
    replace(this.heads.source, this.linked ? plural(this.linked.lines.size, "line") : "");
    this.showCode();
    this.redraw();
  }

  private redraw(): void {
    this.source.redraw();
    this.nodes.redraw();
    this.kernels.redraw();
  }

  private showCode(): void {
    const links = this.links as Links;
    const calls = this.linked ? [...this.linked.calls] : [];
    if (!calls.length) {
      const why = links.calls.length
        ? this.linked ? (this.linked.nodes.size ? "No kernel of its own: a view of another value, or part of the kernels of other nodes." : "Nothing of this line is left: passes dropped or folded all it computes.") : "Choose a line, a node or a kernel."
        : "No kernel source was recorded: this model was compiled without code generation.";
      replace(this.code, h("p", { class: "empty" }, why));
      return;
    }
    const byName = new Map<string, number[]>();
    for (const number of calls) {
      const { name } = links.kernels.calls[number];
      byName.set(name, [...(byName.get(name) ?? []), number]);
    }
    replace(
      this.code,
      [...byName.values()].slice(0, SHOWN_KERNELS).flatMap((numbers) => {
        const call = links.kernels.calls[numbers[0]];
        const source = links.kernels.sources[call.source];
        const times = numbers.length > 1 ? `, called ${integer(numbers.length)} times here` : "";
        const measured = numbers.reduce((sum, number) => sum + (links.kernels.calls[number].measured ?? 0), 0);
        const took = call.measured !== null ? `${time(measured)} a step (measured), ` : "";
        const facts = `${call.graph}, ${plural(call.nodes.length, "node")}, ${took}about ${known(call.seconds, time)} a call (estimated)${times}`;
        return [
          h("h3", {}, call.name),
          h("p", { class: "facts" }, facts),
          h("pre", {}, h("code", {}, source ? highlighted(source.source, source.language) : highlighted(call.text, "python"))),
        ];
      }),
    );
    this.code.scrollTop = 0;
  }

  // ---- rows ----

  private lineAt(index: number): Choice | null {
    const line = this.links?.graphs.data.files[this.file].numbers[index] as number;
    return this.links?.isLinked(this.file, line) || this.links?.isGone(this.file, line) ? { kind: "line", file: this.file, line } : null;
  }

  private mark(element: HTMLElement, isIn: (linked: Linked) => boolean): HTMLElement {
    if (this.linked && isIn(this.linked)) element.classList.add("linked");
    if (this.hovered && isIn(this.hovered)) element.classList.add("hovered");
    element.setAttribute("aria-selected", String(element.classList.contains("linked")));
    return element;
  }

  private sourceRow(index: number): HTMLElement {
    const links = this.links as Links;
    const file = links.graphs.data.files[this.file];
    const line = file.numbers[index];
    const count = links.count(this.file, line);
    const gone = links.isGone(this.file, line);
    const gap = index > 0 && line !== file.numbers[index - 1] + 1;
    const row = h(
      "div",
      {
        class: `vrow source-row${links.isLinked(this.file, line) ? " has" : ""}${gone ? " gone" : ""}${gap ? " gap" : ""}`,
        "data-line": line,
        title: gone ? "nothing of this line is left to compute" : file.lines[index],
      },
      h("span", { class: "number" }, line),
      h("span", { class: "badge" }, count ? integer(count) : gone ? "0" : ""),
      h("code", {}, highlighted(file.lines[index], "python")),
    );
    return this.mark(row, (linked) => linked.lines.has(lineKey(this.file, line)));
  }

  private nodeRow(index: number): HTMLElement {
    const links = this.links as Links;
    const number = this.nodeRows[index];
    const node = links.nodes[number];
    const { graphs } = links;
    const calls = links.ofNode(number).calls.size;
    const row = h(
      "div",
      { class: `vrow node-row ${node.graph}`, "data-node": number, "data-name": node.name, title: `${node.name}: ${graphs.type(node.line)} = ${graphs.call(node.line)}` },
      h("span", { class: "side", title: node.graph }, node.graph === "backward" ? "B" : "F"),
      h("b", {}, node.name),
      h("span", { class: "type" }, graphs.type(node.line)),
      h("span", { class: "call" }, graphs.call(node.line)),
      !calls && h("span", { class: "free", title: "no kernel of its own" }, "–"),
    );
    row.addEventListener("dblclick", () => this.showNode(node.listing, node.version, node.name));
    return this.mark(row, (linked) => linked.nodes.has(number));
  }

  private callRow(index: number): HTMLElement {
    const links = this.links as Links;
    const number = this.callRows[index];
    const call = links.kernels.calls[number];
    const row = h(
      "div",
      { class: `vrow call-row ${call.graph}`, "data-call": number, title: call.text },
      h("span", { class: "side", title: call.graph }, call.graph === "backward" ? "B" : "F"),
      h("b", {}, call.name.replace(/^torch\.ops\./, "").replace(/^extern_kernels\./, "")),
      call.measured !== null
        ? h("span", { class: "time measured", title: `measured; estimated: ${known(call.seconds, time)}` }, time(call.measured))
        : h("span", { class: "time", title: "estimated" }, `≈ ${known(call.seconds, time)}`),
    );
    return this.mark(row, (linked) => linked.calls.has(number));
  }

  // ---- hover ----

  private hover(target: HTMLElement): void {
    const row = target.closest<HTMLElement>(".vrow");
    if (!row) return this.setHover(null);
    if (row.dataset.line) this.setHover(this.linkedOf({ kind: "line", file: this.file, line: Number(row.dataset.line) }));
    else if (row.dataset.node) this.setHover(this.linkedOf({ kind: "node", number: Number(row.dataset.node) }));
    else if (row.dataset.call) this.setHover(this.linkedOf({ kind: "call", number: Number(row.dataset.call) }));
  }

  private setHover(linked: Linked | null): void {
    this.hovered = linked;
    for (const row of this.element.querySelectorAll<HTMLElement>(".vrow")) {
      const { line, node, call } = row.dataset;
      const isIn =
        linked !== null &&
        ((line !== undefined && linked.lines.has(lineKey(this.file, Number(line)))) ||
          (node !== undefined && linked.nodes.has(Number(node))) ||
          (call !== undefined && linked.calls.has(Number(call))));
      row.classList.toggle("hovered", isIn);
    }
  }
}
