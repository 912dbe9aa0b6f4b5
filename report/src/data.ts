// The data that the Python side writes; src/triptych/explaining/page_data.py describes them.

export interface Size {
  nodes: number;
  gemms: number | null;  // null: nothing of it is known
  bytes: number | null;
  seconds: number | null;
  unknown?: number;  // kernel launches that the estimates leave out
  measured?: number | null;  // seconds by the profile
}

export interface Box extends Size {
  key: string;
  label: string;
  side: string;
  passes: number[];
  listing?: number;
  version?: number;
  kernels?: string;
}

export interface Decline {
  rule: string;
  reason: string;
  count: number;
  sites: [string, string][];
}

export interface Decision {
  rule: string;
  node: string;
  before: number;
  after: number;
  source: string;  // modelled or measured, and why it need not be faster
}

export interface Pass {
  program: number;
  stage: string;
  graph: string;
  place: string;
  name: string;
  purpose: string;
  effect: string;
  changed: boolean;
  error: string | null;
  note: string;
  rewrites: number;
  tried: number;
  matched: number;
  before: number;
  after: number;
  seconds: number;
  stop: string;
  fired: [string, number, string, string][];
  declines: Decline[];
  decisions: Decision[];
  listing: number;
  versions: [number, number];
  change: { gemms?: number; bytes?: number; seconds?: number };
}

/** A part of the time of a compile; the parts do not overlap, and together they are the whole. */
export type Phase = [name: string, title: string, seconds: number];

export interface Frame {
  id: string;
  what: string;
  thread: string;
  reason: string;
  breaks: [reason: string, source: string, explanation: string][];
  failure: string;
  seconds: number;
  backward: number;
  programs: number[];
  times: Phase[];
  backwardTimes: Phase[];
}

export type Figure = [
  what: string, unit: string, ours: number | null, theirs: number | null, unknown: [number, number], comparable: boolean,
];

export interface Comparison {
  backends: [string, string];
  figures: Figure[];
  programs: {
    stages: [label: string, side: string, ours: Size | null, theirs: Size | null][];
    graphs: { graph: string; rows: [string, string, string][] }[];
  }[];
}

export interface Interval {
  lane: "computation" | "communication";
  start: number;
  seconds: number;
  what: string;
  node: string;
  nodes: number;
  bytes: number;
}

export interface Timeline {
  seconds: number;
  computation: number;
  communication: number;
  exposed: number;
  collectives: Record<string, number>;
  intervals: Interval[];
}

export interface Timelines {
  program: number;
  graph: string;
  before: Timeline;
  after: Timeline;
}

/** What was measured of several launches that have something in common, or of one. */
export interface Timed {
  name: string;
  seconds: number;
  estimate: number | null;
  launches: number;
  total: number;
}

export interface TimedLaunch {
  program: number;
  graph: string;
  name: string;
  seconds: number;
  estimate: number | null;
  calls: number;
  nodes: string[];
  madeBy: string;
  module: string;
  sources: string[];
}

export interface Profile {
  device: "cpu" | "cuda";
  wall: number;
  kernels: number;
  waiting: number | null;
  notAttributed: number;
  rounds: number;
  launches: TimedLaunch[];
  regions: Timed[];
  modules: Timed[];
}

export interface Core {
  title: string;
  model: string;
  backend: string;
  train: boolean;
  torch: string;
  summary: string;
  mattered: string;
  rest: string;
  launches: string;
  warnings: string[];
  recorded: boolean;
  frames: Frame[];
  programs: { label: string; flow: Box[] }[];
  passes: Pass[];
  timelines: Timelines[];
  profile: Profile | null;
}

export type Splice = [where: number, gone: number, come: number[]];

export interface Listing {
  program: number;
  stage: string;
  graph: string;
  first: number[];
  deltas: Splice[][];
}

export interface GraphData {
  names: string[];
  types: string[];
  rules: string[];
  stacks: [number, number, string][][];
  files: { path: string; installed: boolean; numbers: number[]; lines: string[] }[];
  columns: [
    number[], number[], string[], number[][], number[], number[], number[], number[], number[], number[], number[],
  ];
  listings: Listing[];
  firings: Record<string, [string, string, string[], string[]][]>;
}

export interface KernelCall {
  program: number;
  graph: string;
  name: string;
  text: string;
  source: number;
  nodes: string[];
  gemms: number | null;
  bytes: number | null;
  seconds: number | null;
  measured: number | null;
}

export interface KernelData {
  sources: { name: string; language: string; source: string }[];
  calls: KernelCall[];
}

export const reportTitles = (): string[] =>
  [...document.querySelectorAll<HTMLElement>('script[id$="-core"]')].map((element) => element.dataset.report ?? "");

export const hasPart = (report: number, name: string): boolean => document.getElementById(`data-${report}-${name}`) !== null;

/** One part of one report, decompressed and read when it is first asked for. */
export async function part<T>(report: number, name: string): Promise<T> {
  const element = document.getElementById(`data-${report}-${name}`);
  const text = atob(element?.textContent ?? "");
  const packed = Uint8Array.from(text, (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text()) as T;
}
