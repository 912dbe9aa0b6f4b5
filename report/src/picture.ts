// The picture of what a pass changed: the nodes of a change with their neighbours, before and after in one drawing.

import { h, replace, svg } from "./dom";
import type { Pass } from "./data";
import type { Graphs, Row } from "./graphs";
import layoutSource from "worker:layout";

const MOST = 120;
const MOST_SEEDS = 60;
const MOST_USERS = 12;

type Mark = "same" | "added" | "removed" | "changed";

interface Drawn {
  name: string;
  line: number;
  mark: Mark;
}

interface Neighbourhood {
  nodes: Drawn[];
  edges: [string, string, Mark][];
  left: number;
}

interface Answer {
  id: number;
  width: number;
  height: number;
  nodes: Record<string, [number, number]>;
  edges: { x: number; y: number }[][];
}

/** The changed nodes nearest to `centre` (or to the first change), and what stands beside them. */
export function neighbourhood(graphs: Graphs, pass: Pass, rows: Row[], centre: string): Neighbourhood {
  const nodes = new Map<string, Drawn>();
  const after = graphs.lookup(pass.listing, pass.versions[1]);
  const before = graphs.lookup(pass.listing, pass.versions[0]);
  const changed = new Map<string, Mark>();
  for (const row of rows) {
    if (row.sign === " " || row.sign === "moved") continue;
    for (const line of [row.left, row.right])
      if (line >= 0) {
        const name = graphs.name(line);
        if (name !== "output") changed.set(name, !after.has(name) ? "removed" : !before.has(name) ? "added" : "changed");
      }
  }
  const users = new Map<string, string[]>();
  const inputsOf = (name: string): string[] => {
    const lines = [before.get(name), after.get(name)].filter((line) => line !== undefined);
    return [...new Set(lines.flatMap(graphs.inputs))];
  };
  for (const [name, line] of [...before, ...after])
    for (const input of graphs.inputs(line)) {
      if (!users.has(input)) users.set(input, []);
      const known = users.get(input) as string[];
      if (known.length <= MOST_USERS && known[known.length - 1] !== name) known.push(name);
    }
  const neighbours = (name: string): string[] => [...inputsOf(name), ...(users.get(name) ?? []).slice(0, MOST_USERS)];
  const exists = (name: string): boolean => name !== "output" && (before.has(name) || after.has(name));
  const put = (name: string): void => {
    if (!exists(name) || nodes.has(name)) return;
    const line = after.get(name) ?? before.get(name) ?? -1;
    nodes.set(name, { name, line, mark: changed.get(name) ?? "same" });
  };
  // changes that hang together are drawn first: a search from the centre over changed nodes and their neighbours
  const start = exists(centre) ? centre : (changed.keys().next().value ?? "");
  const seeds = new Set<string>();
  const waiting = start ? [start] : [];
  const seen = new Set(waiting);
  const distance = new Map([[start, 0]]);
  while (waiting.length && seeds.size < MOST_SEEDS) {
    const name = waiting.shift() as string;
    const near = changed.has(name) ? 0 : (distance.get(name) ?? 0) + 1;
    if (changed.has(name) || name === start) seeds.add(name);
    if (near > 2) continue;
    for (const other of neighbours(name))
      if (!seen.has(other) && exists(other)) {
        seen.add(other);
        distance.set(other, near);
        waiting.push(other);
      }
  }
  seeds.forEach(put);
  for (const seed of seeds) for (const other of neighbours(seed)) if (nodes.size < MOST) put(other);
  const edges: Neighbourhood["edges"] = [];
  for (const name of nodes.keys()) {
    const now = new Set(after.has(name) ? graphs.inputs(after.get(name) as number) : []);
    const was = new Set(before.has(name) ? graphs.inputs(before.get(name) as number) : []);
    for (const input of new Set([...now, ...was]))
      if (nodes.has(input))
        edges.push([input, name, now.has(input) ? (was.has(input) ? "same" : "added") : "removed"]);
  }
  const drawn = [...nodes.keys()].filter((name) => changed.has(name)).length;
  return { nodes: [...nodes.values()], edges, left: changed.size - drawn };
}

let worker: Worker | null = null;
let requests = 0;
const answers = new Map<number, (answer: Answer) => void>();

function laidOut(request: { nodes: unknown[]; edges: [string, string][] }): Promise<Answer> {
  if (!worker) {
    worker = new Worker(URL.createObjectURL(new Blob([layoutSource], { type: "text/javascript" })));
    worker.onmessage = ({ data }: MessageEvent<Answer>) => {
      answers.get(data.id)?.(data);
      answers.delete(data.id);
    };
  }
  const id = ++requests;
  return new Promise((resolve) => {
    answers.set(id, resolve);
    worker?.postMessage({ id, ...request });
  });
}

/** `aten.div.Tensor(x, y)` is a div, `x.view(8)` a view. */
const operation = (call: string): string => {
  const path = /^([\w.]+)\(/.exec(call)?.[1].split(".") ?? [call];
  return (path.length > 2 ? path[1] : path[path.length - 1]).slice(0, 24);
};
const CHARACTER = 6.3;
const SIGNS: Record<Mark, string> = { same: "", added: "+ ", removed: "− ", changed: "~ " };

export class Picture {
  readonly element: HTMLElement;
  private canvas = h("div", { class: "canvas", tabindex: 0, role: "group", "aria-label": "Picture of the change" });
  private caption = h("p", { class: "caption" });
  private scale = 1;
  private drawing: SVGElement | null = null;
  private size: [number, number] = [0, 0];
  private request = 0;
  private centre: [number, number] = [0, 0];
  private wasHidden = false;

  constructor(private choose: (name: string, line: number) => void) {
    const button = (text: string, label: string, act: () => void): HTMLElement =>
      h("button", { type: "button", title: label, "aria-label": label, onclick: act }, text);
    this.element = h(
      "section",
      { class: "picture", "aria-label": "What changed, as a picture" },
      h(
        "header",
        {},
        h("h2", {}, "What changed"),
        h(
          "span",
          { class: "tools" },
          button("−", "Smaller", () => this.zoom(1 / 1.25)),
          button("+", "Larger", () => this.zoom(1.25)),
          button("fit", "Fit into the panel", () => this.fit()),
          button("⤢", "Whole window", () => this.element.classList.toggle("whole")),
        ),
      ),
      this.canvas,
      this.caption,
    );
    this.element.addEventListener("keydown", (event) => {
      if ((event as KeyboardEvent).key === "Escape") this.element.classList.remove("whole");
    });
  }

  clear(text: string): void {
    this.request = ++requests;
    this.drawing = null;
    replace(this.canvas);
    replace(this.caption, text);
  }

  async show(graphs: Graphs, pass: Pass, rows: Row[], centre: string): Promise<void> {
    const part = neighbourhood(graphs, pass, rows, centre);
    if (!part.nodes.length) {
      this.clear("Only the order changed.");
      return;
    }
    const texts = new Map(part.nodes.map((node) => [node.name, [SIGNS[node.mark] + graphs.title(node.line), graphs.isInput(node.line) ? "input" : operation(graphs.call(node.line))]]));
    const width = (name: string): number =>
      Math.max(...(texts.get(name) as string[]).map((text) => Math.min(text.length, 30))) * CHARACTER + 14;
    const expected = (this.request = requests + 1);
    const answer = await laidOut({
      nodes: part.nodes.map(({ name }) => ({ id: name, width: width(name), height: 34 })),
      edges: part.edges.map(([from, to]) => [from, to]),
    });
    if (this.request !== expected) return;
    this.size = [answer.width, answer.height];
    const edges = part.edges.map(([, , mark], index) => {
      const points = answer.edges[index].map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`);
      return svg("polyline", { class: `edge ${mark}`, points: points.join(" "), "marker-end": "url(#arrow)" });
    });
    const boxes = part.nodes.map(({ name, line, mark }) => {
      const [x, y] = answer.nodes[name];
      const w = width(name);
      const [first, second] = texts.get(name) as string[];
      const short = (text: string): string => (text.length > 30 ? text.slice(0, 29) + "…" : text);
      return svg(
        "g",
        {
          class: `node ${mark}${name === centre ? " chosen" : ""}`,
          transform: `translate(${(x - w / 2).toFixed(1)},${(y - 17).toFixed(1)})`,
          tabindex: 0,
          role: "button",
          "data-name": name,
          "aria-label": `${name}, ${mark}`,
          onclick: () => this.choose(name, line),
          onkeydown: (event: KeyboardEvent) => {
            if (event.key === "Enter") this.choose(name, line);
          },
        },
        svg("title", {}, `${name}: ${graphs.type(line)} = ${graphs.call(line).slice(0, 300)}`),
        svg("rect", { width: w, height: 34, rx: 5 }),
        svg("text", { x: w / 2, y: 14, class: "node-name" }, short(first)),
        svg("text", { x: w / 2, y: 27, class: "node-operation" }, short(second)),
      );
    });
    const arrow = svg(
      "marker",
      { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
      svg("path", { d: "M0,0 L8,4 L0,8 z", class: "arrow" }),
    );
    this.drawing = svg("svg", { viewBox: `0 0 ${answer.width} ${answer.height}` }, svg("defs", {}, arrow), ...edges, ...boxes);
    replace(this.canvas, this.drawing);
    const legend = ["added", "removed", "changed"].map((mark) => h("span", { class: `legend ${mark}` }, mark));
    replace(this.caption, legend, part.left > 0 && ` ${part.left} further changed nodes are not drawn: choose one of them.`);
    this.centre = answer.nodes[centre] ?? answer.nodes[part.nodes[0].name];
    this.place();
  }

  /** A picture that was drawn while another view was open has not been fitted into the panel. */
  nowVisible(): void {
    if (this.drawing && this.wasHidden) this.place();
  }

  private place(): void {
    this.wasHidden = this.canvas.clientWidth === 0;
    this.fit();
    this.centreOn(this.centre);
  }

  private fit(): void {
    const room = this.canvas.clientWidth - 4;
    this.scale = Math.max(0.55, Math.min(1.1, room / this.size[0]));
    this.zoom(1);
  }

  private zoom(factor: number): void {
    this.scale = Math.max(0.2, Math.min(4, this.scale * factor));
    if (!this.drawing) return;
    this.drawing.setAttribute("width", String(this.size[0] * this.scale));
    this.drawing.setAttribute("height", String(this.size[1] * this.scale));
  }

  private centreOn([x, y]: [number, number]): void {
    this.canvas.scrollLeft = x * this.scale - this.canvas.clientWidth / 2;
    this.canvas.scrollTop = y * this.scale - this.canvas.clientHeight / 2;
  }
}
