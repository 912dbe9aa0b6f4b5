// One node: what it is, where it comes from in the user's program, and its history through all stages.

import type { KernelData } from "./data";
import { h, replace } from "./dom";
import { bytes, time } from "./format";
import type { Graphs } from "./graphs";
import { highlighted } from "./highlight";
import { type Place, type Step, history } from "./history";
import { measuredFacts } from "./profile";
import { lineElement } from "./tokens";

export class NodePanel {
  readonly element = h("section", { class: "node-panel", "aria-label": "The chosen node" });

  constructor(
    private goTo: (step: Step) => void,
    private toSource: (file: number, line: number) => void,
  ) {
    this.clear();
  }

  clear(): void {
    replace(this.element, h("p", { class: "empty" }, "Choose a node, in the listing or in the picture, to see where it comes from and what becomes of it."));
  }

  show(graphs: Graphs, kernels: KernelData | null, place: Place): void {
    const line = graphs.lookup(place.listing, place.version).get(place.name);
    if (line === undefined) return this.clear();
    const frames = graphs.frames(line);
    const cost = graphs.seconds(line);
    const steps = history(graphs, kernels, place);
    replace(
      this.element,
      h("h2", {}, graphs.title(line)),
      h("p", { class: "listing" }, lineElement(graphs, line, -1, "right")),
      measuredFacts(kernels, steps),
      cost > 0 && h("p", { class: "facts" }, `about ${time(cost)} and ${bytes(graphs.bytes(line))} by itself (estimated)`),
      frames.length > 0 && h("h3", {}, "Source"),
      frames.length > 0 &&
        h(
          "ol",
          { class: "frames" },
          frames.map((frame) =>
            h(
              "li",
              {},
              h(
                "button",
                { type: "button", class: "link", title: "Show this line with its nodes and kernels", onclick: () => this.toSource(frame.file, frame.line) },
                `${graphs.data.files[frame.file].path}:${frame.line}`,
              ),
              ` ${frame.fn}`,
              h("code", {}, highlighted(graphs.code(frame), "python")),
            ),
          ),
        ),
      h("h3", {}, "History"),
      h(
        "ol",
        { class: "history" },
        steps.map((step) =>
          h(
            "li",
            { class: step.current ? "current" : "" },
            h("button", { type: "button", class: "link", disabled: step.current || (!step.at && step.kernel < 0), onclick: () => this.goTo(step) }, step.where),
            step.what && ` ${step.what}`,
            step.line >= 0 && h("div", { class: "listing" }, lineElement(graphs, step.line, -1, "right")),
          ),
        ),
      ),
    );
    this.element.scrollTop = 0;
  }
}
