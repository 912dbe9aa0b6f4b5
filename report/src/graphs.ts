// Graphs as lists of lines: any version of any listing, what a pass changed in it, and what became of a node.

import type { GraphData, Listing, Pass } from "./data";

export type Sign = " " | "-" | "+" | "~" | "moved";

/** One row of a difference: lines by number, -1 where there is none. */
export interface Row {
  sign: Sign;
  left: number;
  right: number;
}

export interface Frame {
  file: number;
  line: number;
  fn: string;
}

/** What one pass did to one node of a listing. */
export interface Event {
  pass: number;
  version: number;
  kind: "created" | "removed" | "changed" | "moved";
  line: number;
  was: number;
}

const KEPT_VERSIONS = 6;

export class Graphs {
  readonly lineCount: number;
  private versions = new Map<string, number[]>();
  private eventsOf = new Map<number, Map<string, Event[]>>();
  private namesIn = new Map<string, Map<string, number>>();

  constructor(
    readonly data: GraphData,
    readonly passes: Pass[],
  ) {
    this.lineCount = data.columns[0].length;
  }

  name = (line: number): string => this.data.names[this.data.columns[0][line]];
  type = (line: number): string => this.data.types[this.data.columns[1][line]];
  call = (line: number): string => this.data.columns[2][line];
  isInput = (line: number): boolean => /^input( |$)/.test(this.call(line));
  /** What a reader calls a node: an input by its name in the model, everything else by its own. */
  title(line: number): string {
    const call = this.call(line);
    return call.startsWith("input ") ? call.slice("input ".length) : this.name(line);
  }
  inputs = (line: number): string[] => this.data.columns[3][line].map((number) => this.data.names[number]);
  rule = (line: number): string => this.data.rules[this.data.columns[5][line]];
  origin = (line: number): string => this.data.names[this.data.columns[6][line]] ?? "";
  sequence = (line: number): number => this.data.columns[7][line];
  gemms = (line: number): number => this.data.columns[8][line];
  bytes = (line: number): number => this.data.columns[9][line];
  seconds = (line: number): number => this.data.columns[10][line] * 1e-9;
  stackNumber = (line: number): number => this.data.columns[4][line];

  frames(line: number): Frame[] {
    return this.data.stacks[this.stackNumber(line)].map(([file, number, fn]) => ({ file, line: number, fn }));
  }

  /** `model.py:31`: the innermost source line. */
  source(line: number): string {
    const stack = this.data.stacks[this.stackNumber(line)];
    if (!stack.length) return "";
    const [file, number] = stack[stack.length - 1];
    return `${this.data.files[file].path.split("/").pop()}:${number}`;
  }

  code(frame: Frame): string {
    const file = this.data.files[frame.file];
    const index = file.numbers.indexOf(frame.line);
    return index < 0 ? "" : file.lines[index].trim();
  }

  lastVersion = (listing: number): number => this.data.listings[listing].deltas.length;

  version(listing: number, number: number): number[] {
    const key = `${listing}/${number}`;
    const known = this.versions.get(key);
    if (known) return known;
    const { first, deltas } = this.data.listings[listing];
    let lines = number ? (this.versions.get(`${listing}/${number - 1}`) ?? null) : first;
    if (!lines) {
      lines = first;
      for (let step = 0; step < number - 1; step++) lines = spliced(lines, deltas[step]);
    }
    if (number) lines = spliced(lines, deltas[number - 1]);
    if (this.versions.size >= KEPT_VERSIONS) this.versions.delete(this.versions.keys().next().value as string);
    this.versions.set(key, lines);
    return lines;
  }

  /** Line numbers by node name in one version. */
  lookup(listing: number, version: number): Map<string, number> {
    const key = `${listing}/${version}`;
    let names = this.namesIn.get(key);
    if (!names) {
      names = new Map(this.version(listing, version).map((line) => [this.name(line), line]));
      if (this.namesIn.size >= KEPT_VERSIONS) this.namesIn.delete(this.namesIn.keys().next().value as string);
      this.namesIn.set(key, names);
    }
    return names;
  }

  /** Nodes of one program whose line has all the words: where a stage leaves them or, if it removed them, met them. */
  find(words: string[], program: number, most: number): { listing: number; version: number; line: number }[] {
    const found = new Map<string, { listing: number; version: number; line: number }>();
    this.data.listings.forEach((listing, number) => {
      if (listing.program !== program) return;
      for (const version of new Set([0, this.lastVersion(number)]))
        for (const line of this.version(number, version)) {
          if (this.name(line) === "output") continue;
          const text = `${this.name(line)} ${this.call(line)}`.toLowerCase();
          // a later version of a node takes the place of an earlier one
          if (words.every((word) => text.includes(word)))
            found.set(`${listing.stage === "pre_grad"}/${listing.graph}/${this.name(line)}`, { listing: number, version, line });
        }
    });
    const starts = (hit: { line: number }): boolean => words.some((word) => this.title(hit.line).toLowerCase().startsWith(word));
    return [...found.values()].sort((a, b) => Number(starts(b)) - Number(starts(a))).slice(0, most);
  }

  /** Before and after of a pass, aligned; all rows, the unchanged ones too. */
  rows(pass: Pass): Row[] {
    const [from, to] = pass.versions;
    const before = this.version(pass.listing, from);
    if (from === to) return before.map((line) => ({ sign: " ", left: line, right: line }));
    const delta = this.data.listings[pass.listing].deltas[from];
    const coming = new Set(delta.flatMap(([, , come]) => come.map(this.name)));
    const going = new Set(delta.flatMap(([where, gone]) => before.slice(where, where + gone).map(this.name)));
    const rows: Row[] = [];
    let index = 0;
    const unchanged = (until: number): void => {
      for (; index < until; index++) rows.push({ sign: " ", left: before[index], right: before[index] });
    };
    for (const [where, gone, come] of delta) {
      unchanged(where);
      rows.push(...this.changedRows(before.slice(where, where + gone), come, coming, going));
      index = where + gone;
    }
    unchanged(before.length);
    return rows;
  }

  /** Rows of one changed stretch: a node that stays keeps its row, what goes stands beside what comes. */
  private changedRows(gone: number[], come: number[], coming: Set<string>, going: Set<string>): Row[] {
    const rows: Row[] = [];
    const place = new Map(come.map((line, index) => [this.name(line), index]));
    let left: Row[] = [];
    let right: Row[] = [];
    let done = 0;
    const flush = (): void => {
      for (let i = 0; i < Math.max(left.length, right.length); i++) {
        const [a, b] = [left[i], right[i]];
        if (a && b && a.sign === "-" && b.sign === "+") rows.push({ sign: "~", left: a.left, right: b.right });
        else rows.push(...[a, b].filter(Boolean));
      }
      left = [];
      right = [];
    };
    const add = (line: number): void => {
      right.push({ sign: going.has(this.name(line)) ? "moved" : "+", left: -1, right: line });
    };
    for (const line of gone) {
      const at = place.get(this.name(line)) ?? -1;
      if (at < done) {
        left.push({ sign: coming.has(this.name(line)) ? "moved" : "-", left: line, right: -1 });
        continue;
      }
      come.slice(done, at).forEach(add);
      flush();
      rows.push({ sign: "~", left: line, right: come[at] });
      done = at + 1;
    }
    come.slice(done).forEach(add);
    flush();
    return rows;
  }

  /** What each pass did to each node of a listing, by name. */
  events(listing: number): Map<string, Event[]> {
    const known = this.eventsOf.get(listing);
    if (known) return known;
    const events = new Map<string, Event[]>();
    const owner = new Map(
      this.passes.flatMap((pass, number) =>
        pass.listing === listing && pass.versions[0] !== pass.versions[1] ? [[pass.versions[0], number]] : [],
      ) as [number, number][],
    );
    let lines = this.data.listings[listing].first;
    this.data.listings[listing].deltas.forEach((delta, from) => {
      const pass = owner.get(from) ?? -1;
      const gone = new Map<string, number>();
      for (const [where, count] of delta)
        for (let i = where; i < where + count; i++) gone.set(this.name(lines[i]), lines[i]);
      const put = (name: string, kind: Event["kind"], line: number, was: number): void => {
        if (!events.has(name)) events.set(name, []);
        events.get(name)?.push({ pass, version: from + 1, kind, line, was });
      };
      for (const [, , come] of delta)
        for (const line of come) {
          const name = this.name(line);
          const was = gone.get(name);
          if (was === undefined) put(name, "created", line, -1);
          else put(name, was === line ? "moved" : "changed", line, was);
          gone.delete(name);
        }
      for (const [name, line] of gone) put(name, "removed", line, line);
      lines = spliced(lines, delta);
    });
    this.eventsOf.set(listing, events);
    return events;
  }

  firings(pass: number): [string, string, string[], string[]][] {
    return this.data.firings[String(pass)] ?? [];
  }
}

function spliced(lines: number[], delta: Listing["deltas"][number]): number[] {
  const result: number[] = [];
  let index = 0;
  for (const [where, gone, come] of delta) {
    for (; index < where; index++) result.push(lines[index]);
    for (const line of come) result.push(line);
    index = where + gone;
  }
  for (; index < lines.length; index++) result.push(lines[index]);
  return result;
}
