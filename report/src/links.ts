// Which source lines, nodes and kernel calls belong together, in all directions.

import type { KernelData } from "./data";
import type { Graphs } from "./graphs";
import { originOf } from "./history";

export interface NodeRow {
  graph: string;
  listing: number;
  version: number;
  line: number;
  name: string;
}

export interface Linked {
  lines: Set<string>;
  nodes: Set<number>;
  calls: Set<number>;
}

export const lineKey = (file: number, line: number): string => `${file}:${line}`;

/** The last graphs of one captured program, with their source lines and kernels. */
export class Links {
  readonly nodes: NodeRow[] = [];
  readonly calls: number[] = [];
  private byLine = new Map<string, number[]>();
  private ownLines = new Map<string, number>();
  private byName = new Map<string, number>();
  /** Lines that had nodes at some point. */
  private captured = new Set<string>();
  private linesOf = new Map<number, string[]>();
  private callsOf = new Map<number, number[]>();

  constructor(
    readonly graphs: Graphs,
    readonly kernels: KernelData,
    readonly program: number,
  ) {
    const last = new Map<string, number>();
    graphs.data.listings.forEach((listing, number) => {
      const ends = listing.stage === "post_grad" || listing.stage === "before_codegen";
      if (listing.program === program && ends && !listing.graph.includes(".")) last.set(listing.graph, number);
    });
    const absorbed = new AbsorbedSources(graphs, program);
    for (const listing of graphs.data.listings)
      if (listing.program === program)
        for (const line of listing.first) {
          const frame = graphs.isInput(line) ? undefined : graphs.data.stacks[graphs.stackNumber(line)].at(-1);
          if (frame) this.captured.add(lineKey(frame[0], frame[1]));
        }
    for (const [graph, listing] of last) {
      const version = graphs.lastVersion(listing);
      for (const line of graphs.version(listing, version)) {
        const name = graphs.name(line);
        if (name === "output" || graphs.isInput(line)) continue;
        const index = this.nodes.push({ graph, listing, version, line, name }) - 1;
        this.byName.set(`${side(graph)}/${name}`, index);
        const stack = graphs.data.stacks[graphs.stackNumber(line)];
        stack.forEach(([file, number], depth) => {
          const key = lineKey(file, number);
          if (!this.byLine.has(key)) this.byLine.set(key, []);
          this.byLine.get(key)?.push(index);
          if (depth === stack.length - 1) this.own(index, key);
        });
        for (const number of absorbed.stacksOf(listing, line)) {
          const frame = graphs.data.stacks[number].at(-1);
          const key = frame && lineKey(frame[0], frame[1]);
          if (!key || this.byLine.get(key)?.at(-1) === index) continue;
          if (!this.byLine.has(key)) this.byLine.set(key, []);
          this.byLine.get(key)?.push(index);
          this.own(index, key);
        }
      }
    }
    kernels.calls.forEach((call, number) => {
      if (call.program !== program) return;
      this.calls.push(number);
      for (const name of call.nodes) {
        const index = this.byName.get(`${call.graph}/${name}`);
        if (index === undefined) continue;
        if (!this.callsOf.has(index)) this.callsOf.set(index, []);
        this.callsOf.get(index)?.push(number);
      }
    });
  }

  /** A line that computes a node itself, not by a call of another function. */
  private own(node: number, key: string): void {
    this.ownLines.set(key, (this.ownLines.get(key) ?? 0) + 1);
    this.linesOf.set(node, [...(this.linesOf.get(node) ?? []), key]);
  }

  /** How many nodes a source line became; calls of functions that have lines of their own count there. */
  count = (file: number, line: number): number => this.ownLines.get(lineKey(file, line)) ?? 0;
  isLinked = (file: number, line: number): boolean => this.byLine.has(lineKey(file, line));
  /** A line of which nothing is left to compute. */
  isGone = (file: number, line: number): boolean => !this.isLinked(file, line) && this.captured.has(lineKey(file, line));

  private around(nodes: Iterable<number>): Linked {
    const linked: Linked = { lines: new Set(), nodes: new Set(nodes), calls: new Set() };
    for (const node of linked.nodes) {
      for (const key of this.linesOf.get(node) ?? []) linked.lines.add(key);
      for (const call of this.callsOf.get(node) ?? []) linked.calls.add(call);
    }
    return linked;
  }

  ofLine(file: number, line: number): Linked {
    const linked = this.around(this.byLine.get(lineKey(file, line)) ?? []);
    linked.lines = new Set([lineKey(file, line)]);
    return linked;
  }

  ofNode = (node: number): Linked => this.around([node]);

  ofCall(call: number): Linked {
    const { graph, nodes } = this.kernels.calls[call];
    const indices = nodes.map((name) => this.byName.get(`${graph}/${name}`)).filter((index) => index !== undefined);
    const linked = this.around(indices);
    linked.calls = new Set([call]);
    return linked;
  }

  nodeNumber = (graph: string, name: string): number => this.byName.get(`${side(graph)}/${name}`) ?? -1;
}

/** Source lines whose own nodes are gone, replaced by nodes that stand for another line: a fusion takes several. */
class AbsorbedSources {
  private stacks = new Map<string, Set<number>>();

  constructor(
    private graphs: Graphs,
    program: number,
  ) {
    const known = new Map<string, number>();
    graphs.data.listings.forEach((listing, number) => {
      if (listing.program !== program) return;
      const world = this.world(number);
      for (const line of listing.first) known.set(`${world}/${graphs.name(line)}`, graphs.stackNumber(line));
      for (const delta of listing.deltas)
        for (const [, , come] of delta)
          for (const line of come) known.set(`${world}/${graphs.name(line)}`, graphs.stackNumber(line));
    });
    graphs.passes.forEach((pass, number) => {
      if (pass.program !== program || pass.listing < 0) return;
      const world = this.world(pass.listing);
      for (const [, , removed, created] of graphs.firings(number)) {
        if (!created.length) continue;
        const taken = new Set<number>();
        for (const name of removed) {
          const key = `${world}/${name}`;
          const own = known.get(key);
          if (own !== undefined) taken.add(own);
          this.stacks.get(key)?.forEach((stack) => taken.add(stack));
        }
        for (const name of created) {
          const key = `${world}/${name}`;
          this.stacks.set(key, new Set([...(this.stacks.get(key) ?? []), ...taken]));
        }
      }
    });
  }

  /** Names mean other nodes before autograd than after it. */
  private world = (listing: number): string => (this.graphs.data.listings[listing].stage === "pre_grad" ? "torch" : "aten");

  stacksOf(listing: number, line: number): Set<number> {
    const own = this.stacks.get(`aten/${this.graphs.name(line)}`) ?? [];
    const origin = originOf(this.graphs, listing, line);
    const before = origin ? (this.stacks.get(`torch/${origin}`) ?? []) : [];
    return new Set([...own, ...before]);
  }
}

/** Without a gradient the one graph that runs is the forward graph. */
const side = (graph: string): string => (graph === "inference" ? "forward" : graph);
