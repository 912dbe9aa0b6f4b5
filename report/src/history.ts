// A node through all stages: from the call that Dynamo captured to the kernel that computes it.

import type { KernelData } from "./data";
import { plural } from "./format";
import type { Graphs } from "./graphs";

export interface Place {
  listing: number;
  version: number;
  name: string;
}

export interface Step {
  /** Where it happened, in words: a stage, a pass or code generation. */
  where: string;
  what: string;
  pass: number;
  at: Place | null;
  line: number;
  kernel: number;
  current: boolean;
}

const MOST_NODES = 6;
const MOST_STEPS = 60;

export function history(graphs: Graphs, kernels: KernelData | null, place: Place): Step[] {
  const steps = [...backwards(graphs, place), ...forwards(graphs, kernels, place)];
  return steps.slice(0, MOST_STEPS);
}

function step(part: Partial<Step>): Step {
  return { where: "", what: "", pass: -1, at: null, line: -1, kernel: -1, current: false, ...part };
}

const TORCH_STAGE = "pre_grad";

const label = (graphs: Graphs, listing: number): string => {
  const { stage, graph } = graphs.data.listings[listing];
  return graph.startsWith(stage) ? graph : `${stage} ${graph}`;
};

/** From where the node is back to what Dynamo captured, the earliest first. */
function backwards(graphs: Graphs, place: Place): Step[] {
  const steps: Step[] = [];
  const seen = new Set<string>();
  let current = [place.name];
  let listing = place.listing;
  let version = place.version;
  for (;;) {
    const names = new Set(current);
    const events = graphs.events(listing);
    for (let at = version; at >= 1; at--) {
      for (const name of [...names]) {
        const event = (events.get(name) ?? []).find((one) => one.version === at);
        if (!event || event.kind === "moved" || event.kind === "removed") continue;
        const pass = graphs.passes[event.pass];
        // how each of many ancestors is spelled says nothing of the node
        if (event.kind === "changed" && names.size > 1 && pass?.effect === "spelling") continue;
        const made = graphs.firings(event.pass).find(([, , , created]) => created.includes(name));
        const before = (made?.[2] ?? []).filter((one) => one !== name).slice(0, MOST_NODES);
        const why = made ? made[0] : (pass?.name ?? "");
        const what =
          event.kind === "created"
            ? `created by ${why}${before.length ? ` from ${before.join(", ")}` : ""}`
            : // a rule that created the node earlier has nothing to do with this change
              `rewritten${graphs.rule(event.line) !== graphs.rule(event.was) ? ` by ${graphs.rule(event.line)}` : ""}`;
        steps.unshift(
          step({ where: pass?.name ?? "", what, pass: event.pass, at: { listing, version: at, name }, line: event.line }),
        );
        if (event.kind === "created") {
          names.delete(name);
          before.forEach((one) => names.add(one));
        }
      }
    }
    const first = graphs.lookup(listing, 0);
    current = [...names].filter((name) => first.has(name)).slice(0, MOST_NODES);
    for (const name of current) {
      const line = first.get(name) as number;
      const key = `${listing}/${name}`;
      if (seen.has(key)) continue;
      seen.add(key);
      const stage = graphs.data.listings[listing].stage;
      if (stage === TORCH_STAGE)
        steps.unshift(step({ where: "Dynamo", what: "captured", at: { listing, version: 0, name }, line }));
    }
    const earlier = previous(graphs, listing, current, first);
    if (!earlier) return steps;
    if (graphs.data.listings[listing].stage === "joint" || graphs.data.listings[earlier.listing].stage === TORCH_STAGE)
      for (const name of current.slice(0, 3))
        steps.unshift(
          step({
            where: "AOTAutograd",
            what: graphs.origin(first.get(name) as number) ? "traced" : "traced, as part of its gradient",
            at: { listing, version: 0, name },
            line: first.get(name) as number,
          }),
        );
    ({ listing, version, names: current } = earlier);
  }
}

function previous(
  graphs: Graphs,
  listing: number,
  names: string[],
  lines: Map<string, number>,
): { listing: number; version: number; names: string[] } | null {
  const program = graphs.data.listings[listing].program;
  for (let earlier = listing - 1; earlier >= 0; earlier--) {
    const other = graphs.data.listings[earlier];
    if (other.program !== program || other.graph.includes(".")) continue;
    const version = graphs.lastVersion(earlier);
    const there = graphs.lookup(earlier, version);
    const wanted =
      other.stage === TORCH_STAGE
        ? names.map((name) => originOf(graphs, listing, lines.get(name) as number))
        : names;
    const shared = [...new Set(wanted)].filter((name) => name && there.has(name));
    if (shared.length) return { listing: earlier, version, names: shared };
  }
  return null;
}

const originsBySequence = new WeakMap<Graphs, Map<string, string>>();

/** The node of the captured graph that an ATen node comes from; a gradient comes from the node of its forward. */
export function originOf(graphs: Graphs, listing: number, line: number): string {
  const own = graphs.origin(line);
  if (own) return own;
  let origins = originsBySequence.get(graphs);
  if (!origins) {
    origins = new Map();
    for (const { program, stage, first } of graphs.data.listings)
      if (stage === "joint" || stage === "post_grad")
        for (const one of first)
          if (graphs.origin(one) && graphs.sequence(one) >= 0) {
            const key = `${program}/${graphs.sequence(one)}`;
            if (!origins.has(key)) origins.set(key, graphs.origin(one));
          }
    originsBySequence.set(graphs, origins);
  }
  return origins.get(`${graphs.data.listings[listing].program}/${graphs.sequence(line)}`) ?? "";
}

/** From where the node is to the kernels that it ends in. */
function forwards(graphs: Graphs, kernels: KernelData | null, place: Place): Step[] {
  const now = graphs.lookup(place.listing, place.version).get(place.name);
  const steps: Step[] = [
    step({
      where: `here, in ${label(graphs, place.listing)}`,
      what: "",
      at: place,
      line: now ?? -1,
      current: true,
    }),
  ];
  const program = graphs.data.listings[place.listing].program;
  let listing = place.listing;
  let version = place.version;
  const names = new Set([place.name]);
  const reached = new Map<string, Set<string>>();
  for (;;) {
    const events = graphs.events(listing);
    for (let at = version + 1; at <= graphs.lastVersion(listing); at++)
      for (const name of [...names]) {
        const event = (events.get(name) ?? []).find((one) => one.version === at);
        if (!event || event.kind === "moved" || event.kind === "created") continue;
        const pass = graphs.passes[event.pass];
        const firing = graphs.firings(event.pass).find(([, , removed]) => removed.includes(name));
        const after = (firing?.[3] ?? []).filter((one) => one !== name).slice(0, MOST_NODES);
        const into = after.length ? `, ${after.join(", ")} in its place` : "";
        const what =
          event.kind === "removed" ? `removed${firing ? ` by ${firing[0]}` : ""}${into}` : "rewritten";
        const next = event.kind === "removed" ? after[0] : name;
        steps.push(
          step({
            where: pass?.name ?? "",
            what,
            pass: event.pass,
            at: next ? { listing, version: at, name: next } : null,
            line: event.kind === "removed" ? -1 : event.line,
          }),
        );
        if (event.kind === "removed") {
          names.delete(name);
          after.forEach((one) => names.add(one));
        }
      }
    const graph = graphs.data.listings[listing].graph;
    reached.set(graph, new Set(names));
    const inTorch = graphs.data.listings[listing].stage === TORCH_STAGE;
    const later = graphs.data.listings.findIndex(
      (other, number) =>
        number > listing &&
        other.program === program &&
        follows(other.graph, graph) &&
        (inTorch || [...names].some((name) => graphs.lookup(number, 0).has(name))),
    );
    if (later < 0 || !names.size) break;
    const first = graphs.lookup(later, 0);
    if (inTorch) {
      const wanted = new Set(names);
      names.clear();
      for (const [name, line] of first) if (wanted.has(graphs.origin(line))) names.add(name);
      const shown = [...names].slice(0, MOST_NODES);
      steps.push(
        ...shown.map((name) =>
          step({ where: "AOTAutograd", what: "becomes", at: { listing: later, version: 0, name }, line: first.get(name) as number }),
        ),
      );
      if (names.size > shown.length) steps.push(step({ where: "AOTAutograd", what: `and ${plural(names.size - shown.length, "more node")}` }));
    }
    listing = later;
    version = 0;
  }
  // the joint graph is parted in two: each half has its own kernels
  const last = new Set([...names, ...[...reached.values()].flatMap((set) => [...set])]);
  const inTorch = graphs.data.listings[listing].stage === TORCH_STAGE;
  if (kernels && !inTorch)
    kernels.calls.forEach((call, number) => {
      if (call.program === program && call.nodes.some((name) => last.has(name)) && names.size)
        steps.push(step({ where: "code generation", what: `${call.graph}: ${call.name}`, kernel: number }));
    });
  return steps;
}

/** Whether a listing of `later` can show what happens next to nodes of `earlier`. */
function follows(later: string, earlier: string): boolean {
  if (earlier === "pre_grad") return later === "joint" || later === "inference" || later === "forward";
  if (earlier === "joint") return ["joint", "forward", "inference", "backward"].includes(later);
  return later === earlier;
}
