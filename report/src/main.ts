// The report page: what each pass did to a model, from the captured program to the kernels.

import { Columns } from "./columns";
import { Compare } from "./compare";
import { type Box, type Comparison, type Core, type GraphData, hasPart, type KernelData, part, reportTitles } from "./data";
import { DiffView } from "./diffview";
import { h, replace } from "./dom";
import { flow } from "./flow";
import { Frames } from "./frames";
import { Graphs, type Row } from "./graphs";
import type { Place, Step } from "./history";
import { NodePanel } from "./nodepanel";
import { PassList } from "./passlist";
import { Picture } from "./picture";
import { ProfileView } from "./profile";
import { TimelineView } from "./timeline";

const FOUND_NODES = 40;

type View = "passes" | "columns" | "frames" | "compare" | "timeline" | "profile";

class Report {
  private report = 0;
  private program = 1;
  private core!: Core;
  private graphs: Promise<Graphs> | null = null;
  private kernels: Promise<KernelData> | null = null;
  private pass = -1;
  private box = -1;
  private view: View = "passes";
  private place: Place | null = null;
  private rows: Row[] = [];

  private list = new PassList((pass) => void this.showPass(pass));
  private diff = new DiffView((name, side) => void this.chooseNode(name, side));
  private picture = new Picture((name) => void this.chooseNode(name, "right"));
  private node = new NodePanel((step) => void this.follow(step), (file, line) => void this.showLine(file, line));
  private columns = new Columns((listing, version, name) => void this.showNode({ listing, version, name }));
  private frames = new Frames((program) => {
    this.showProgram(program);
    void this.open("passes");
  });
  private compare = new Compare();
  private timeline = new TimelineView();
  private profile = new ProfileView();
  private head = h("header", { class: "top" });
  private flow = h("div", { class: "flow-holder" });
  private passView = h("div", { class: "pass-view" });
  private help = helpDialog();
  private tabs: Record<View, HTMLElement>;

  constructor(app: HTMLElement) {
    const tab = (view: View, text: string): HTMLElement =>
      h("button", { type: "button", role: "tab", id: `tab-${view}`, "aria-selected": "false", onclick: () => void this.open(view) }, text);
    this.tabs = {
      passes: tab("passes", "Passes"),
      columns: tab("columns", "Source · nodes · kernels"),
      frames: tab("frames", "Compiles"),
      compare: tab("compare", "Comparison"),
      timeline: tab("timeline", "Ranks"),
      profile: tab("profile", "Measured"),
    };
    const right = h("aside", { class: "panel-right", "aria-label": "Picture and node" }, this.picture.element, this.node.element);
    this.passView.append(this.list.element, this.diff.element, right);
    this.hideAllBut("passes");  // before anything is measured
    app.append(this.head, this.flow, this.passView, this.columns.element, this.frames.element, this.compare.element, this.timeline.element, this.profile.element, this.help);
    document.addEventListener("keydown", (event) => this.key(event));
  }

  async start(report: number): Promise<void> {
    this.report = report;
    this.core = await part<Core>(report, "core");
    this.graphs = this.kernels = null;
    document.title = `Triptych: ${this.core.title}`;
    this.showProgram(1);
    const isFirst = document.documentElement.dataset.ready === undefined;
    await this.open(isFirst && this.has("compare") ? "compare" : isFirst && this.core.recorded && this.has("frames") ? "frames" : "passes");
  }

  private has(view: View): boolean {
    if (view === "frames") return Frames.has(this.core);
    if (view === "timeline") return TimelineView.has(this.core);
    if (view === "profile") return ProfileView.has(this.core);
    return view !== "compare" || hasPart(0, "comparison");
  }

  private loadGraphs(): Promise<Graphs> {
    this.graphs ??= part<GraphData>(this.report, "graphs").then((data) => {
      const graphs = new Graphs(data, this.core.passes);
      this.list.findNodes = (words) =>
        graphs.find(words, this.program, FOUND_NODES).map(({ listing, version, line }) => {
          const { stage, graph } = data.listings[listing];
          const where = (graph.startsWith(stage) ? graph : `${stage} ${graph}`).replaceAll("_", "-");
          const name = graphs.name(line);
          return { name: graphs.title(line), where, text: graphs.call(line), go: () => void this.showNode({ listing, version, name }) };
        });
      return graphs;
    });
    return this.graphs;
  }

  private loadKernels(): Promise<KernelData> {
    this.kernels ??= part<KernelData>(this.report, "kernels");
    return this.kernels;
  }

  // ---- the frame ----

  private showProgram(program: number): void {
    this.program = program;
    this.drawHead();
    replace(this.flow, this.core.programs.length ? flow(this.core.programs[program - 1].flow, (box, index) => void this.showBox(box, index)) : "");
    this.list.show(this.core.passes, program);
    this.node.clear();
    const own = this.core.passes.map((_, number) => number).filter((number) => this.core.passes[number].program === program);
    const changed = own.filter((number) => this.core.passes[number].changed);
    // open with what people ask about: a fusion, else the first change that is more than a spelling
    const effect = (number: number): string => this.core.passes[number].effect;
    const first =
      changed.find((number) => effect(number) === "yours" || effect(number) === "fusion") ??
      changed.find((number) => effect(number) !== "spelling") ??
      changed[0] ?? own[0] ?? -1;
    this.pass = -1;
    if (first >= 0) void this.showPass(first);
    else this.diff.showText("Nothing was captured", h("p", {}, "Dynamo found no tensor operation to compile in this call."));
  }

  private drawHead(): void {
    const { core } = this;
    const options = (count: number, text: (index: number) => string): HTMLElement[] =>
      Array.from({ length: count }, (_, index) => h("option", { value: index }, text(index)));
    const reports = reportTitles();
    const chooseReport = h("select", { "aria-label": "Report", onchange: (event: Event) => void this.start(Number((event.target as HTMLSelectElement).value)) }, options(reports.length, (index) => reports[index]));
    chooseReport.value = String(this.report);
    const chooseProgram = h(
      "select",
      { "aria-label": "Captured program", onchange: (event: Event) => {
        this.showProgram(Number((event.target as HTMLSelectElement).value) + 1);
        void this.open(this.view === "frames" ? "passes" : this.view);
      } },
      options(core.programs.length, (index) => `program ${index + 1} of ${core.programs.length}${core.programs[index].label && `: ${core.programs[index].label}`}`),
    );
    chooseProgram.value = String(this.program - 1);
    const important = [core.mattered, core.launches].filter(Boolean);
    const rest = core.summary.split("; ").filter((piece) => !important.includes(piece));
    replace(
      this.head,
      h(
        "div",
        { class: "bar" },
        reports.length > 1 ? h("h1", {}, chooseReport) : h("h1", {}, core.title),
        h("div", { role: "tablist", class: "tabs" }, (Object.keys(this.tabs) as View[]).map((view) => this.has(view) && this.tabs[view])),
        core.programs.length > 1 && chooseProgram,
        h("button", { type: "button", class: "icon", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: toggleTheme }, "◐"),
        h("button", { type: "button", class: "icon", title: "Keys (?)", "aria-label": "Help", onclick: () => this.help.showModal() }, "?"),
      ),
      h("p", { class: "summary" }, important.length > 0 && h("strong", {}, important.join("; ")), h("span", {}, rest.join(" · "))),
      core.warnings.map((warning) => h("p", { class: "warning" }, `! ${warning}`)),
    );
  }

  private hideAllBut(view: View): void {
    this.passView.hidden = view !== "passes";
    this.columns.element.hidden = view !== "columns";
    this.frames.element.hidden = view !== "frames";
    this.compare.element.hidden = view !== "compare";
    this.timeline.element.hidden = view !== "timeline";
    this.profile.element.hidden = view !== "profile";
    // of the compare view and of all compiles, no single flow is the one
    this.flow.hidden = view === "frames" || view === "compare";
  }

  private async open(view: View): Promise<void> {
    for (const [name, tab] of Object.entries(this.tabs)) tab.setAttribute("aria-selected", String(name === view));
    this.view = view;
    this.hideAllBut(view);
    if (view === "passes") {
      this.list.revealCurrent();
      this.picture.nowVisible();
    }
    if (view === "frames") this.frames.show(this.core);
    if (view === "timeline") this.timeline.show(this.core, this.program);
    if (view === "profile") this.profile.show(this.core);
    if (view === "compare") {
      const [comparison, ours, theirs] = await Promise.all([part<Comparison>(0, "comparison"), part<Core>(0, "core"), part<Core>(1, "core")]);
      this.compare.show(comparison, [ours, theirs], this.program, (report, pass) => void this.showPassOf(report, pass));
    }
    if (view === "columns") {
      const [graphs, kernels] = await Promise.all([this.loadGraphs(), this.loadKernels()]);
      this.columns.show(graphs, kernels, this.program);
    }
  }

  private markBox(index: number): void {
    this.box = index;
    for (const element of this.flow.querySelectorAll<HTMLElement>(".box"))
      element.setAttribute("aria-pressed", String(Number(element.dataset.index) === index));
  }

  // ---- choices ----

  private async showPassOf(report: number, pass: number): Promise<void> {
    if (report !== this.report) await this.start(report);
    const { program } = this.core.passes[pass];
    if (program !== this.program) this.showProgram(program);
    await this.open("passes");
    await this.showPass(pass);
  }

  private async showPass(number: number, node = ""): Promise<void> {
    const { core } = this;
    const pass = core.passes[number];
    this.pass = number;
    this.place = null;
    this.list.mark(number);
    this.markBox(core.programs[this.program - 1].flow.findIndex((box) => box.passes.includes(number)));
    this.diff.showHead(pass, core);
    this.diff.mark(node);
    if (!pass.changed || pass.listing < 0) {
      this.picture.clear(pass.changed ? "" : "This pass changed nothing.");
      return;
    }
    const graphs = await this.loadGraphs();
    if (this.pass !== number) return;
    this.rows = graphs.rows(pass);
    this.diff.showPass(graphs, this.rows);
    void this.picture.show(graphs, pass, this.rows, node);
    if (node) this.diff.goTo(node);
  }

  private async showBox(box: Box, index: number): Promise<void> {
    await this.open(box.kernels ? "columns" : "passes");
    this.markBox(index);
    if (box.kernels) return;
    await this.showGraph(box, index);
    if (box.passes.length) this.list.reveal(this.core.passes[box.passes[0]].place);
  }

  private async showGraph(box: Box, index: number): Promise<void> {
    this.pass = -1;
    this.place = null;
    this.list.mark(-1);
    const graphs = await this.loadGraphs();
    if (this.box !== index) return;
    const names: Record<string, string> = { dynamo: "as Dynamo captured it", autograd: "as AOTAutograd traced it", partition: `after the partition` };
    const title = `The ${box.side ? box.side + " " : ""}graph ${names[box.key] ?? `after ${box.label}`}`;
    this.diff.showGraph(graphs, graphs.version(box.listing as number, box.version as number), title, box);
    const first = this.list.first(box.passes);
    this.picture.clear(first >= 0 ? "Choose a pass on the left to see what it changed." : "");
    this.rows = [];
  }

  private async chooseNode(name: string, side: "left" | "right"): Promise<void> {
    const graphs = await this.loadGraphs();
    const pass = this.core.passes[this.pass];
    const box = this.core.programs[this.program - 1].flow[this.box];
    const listing = pass ? pass.listing : (box?.listing ?? -1);
    if (listing < 0) return;
    const [before, after] = pass ? pass.versions : [box.version as number, box.version as number];
    // a node that the pass removed is there only before it
    const version = side === "right" && graphs.lookup(listing, after).has(name) ? after : before;
    this.place = { listing, version, name };
    this.diff.mark(name);
    this.node.show(graphs, await this.loadKernels(), this.place);
    if (pass?.changed) void this.picture.show(graphs, pass, this.rows, name);
  }

  private async follow(step: Step): Promise<void> {
    if (step.kernel >= 0) {
      await this.open("columns");
      this.columns.pinCall(step.kernel);
    } else if (step.at && step.pass >= 0) {
      await this.open("passes");
      await this.showPass(step.pass, step.at.name);
      await this.chooseNode(step.at.name, "right");
      this.diff.goTo(step.at.name);
    } else if (step.at) await this.showNode(step.at);
  }

  /** A node in the graph that it is in, whole. */
  private async showNode(place: Place): Promise<void> {
    await this.open("passes");
    const boxes = this.core.programs[this.program - 1].flow;
    const last = boxes.findIndex((box) => box.listing === place.listing && box.version === place.version);
    const index = last >= 0 ? last : boxes.findIndex((box) => box.listing === place.listing);
    if (index < 0) return;
    this.markBox(index);
    await this.showGraph(boxes[index], index);
    this.diff.goTo(place.name);
    await this.chooseNode(place.name, "right");
  }

  private async showLine(file: number, line: number): Promise<void> {
    await this.open("columns");
    this.columns.pinLine(file, line);
  }

  private key(event: KeyboardEvent): void {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.metaKey || event.altKey || this.help.open) return;
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName) && (target as HTMLInputElement).type !== "checkbox") return;
    const act: Record<string, () => void> = {
      j: () => this.list.move(1),
      k: () => this.list.move(-1),
      n: () => this.diff.nextChange(1),
      p: () => this.diff.nextChange(-1),
      c: () => this.list.toggleChanged(),
      t: toggleTheme,
      "1": () => void this.open("passes"),
      "2": () => void this.open("columns"),
      "3": () => this.has("frames") && void this.open("frames"),
      "4": () => this.has("compare") && void this.open("compare"),
      "5": () => this.has("timeline") && void this.open("timeline"),
      "6": () => this.has("profile") && void this.open("profile"),
      "/": () => void this.open("passes").then(() => this.list.search.focus()),
      "?": () => this.help.showModal(),
    };
    const action = act[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }
}

function toggleTheme(): void {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}

function helpDialog(): HTMLDialogElement {
  const keys: [string, string][] = [
    ["j, k or ↓, ↑", "next, previous pass"],
    ["n, p", "next, previous change of the pass"],
    ["/", "search passes, rules, reasons to decline, nodes"],
    ["c", "only passes that changed something, or all"],
    ["1, 2", "passes; source, nodes and kernels"],
    ["3, 4, 5, 6", "what Dynamo compiled; the comparison; communication with other ranks; measured times: if the page has them"],
    ["Tab, Enter", "go to a node, choose it: its source, its history"],
    ["Esc", "leave the search; let go of a choice"],
    ["t", "light or dark"],
  ];
  return h(
    "dialog",
    { "aria-label": "Keys" },
    h("form", { method: "dialog" }, h("h2", {}, "Keys"), h("dl", {}, keys.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])), h("button", {}, "close")),
  );
}

const app = document.getElementById("app") as HTMLElement;
new Report(app).start(0).then(
  () => {
    performance.mark("report-ready");
    document.documentElement.dataset.ready = "true";
  },
  (error: unknown) => {
    app.replaceChildren(h("p", { class: "warning empty" }, `The report could not be read; a current browser is needed. ${error}`));
    throw error;
  },
);
