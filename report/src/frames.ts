// What Dynamo compiled in a run: every function, why it was compiled again, where its graph breaks, and its programs.

import { compileTimes, hasTimes } from "./compiletimes";
import type { Core, Frame } from "./data";
import { h, replace } from "./dom";
import { plural, time } from "./format";

export class Frames {
  readonly element = h("div", { class: "frames-view", tabindex: -1 });

  constructor(private go: (program: number) => void) {}

  /** Is there more to say than that one function was compiled? */
  static has(core: Core): boolean {
    return core.recorded ? core.frames.length > 0 : core.frames.some((frame) => frame.reason || frame.failure || frame.breaks.length || hasTimes(frame));
  }

  show(core: Core): void {
    const threads = new Set(core.frames.map((frame) => frame.thread));
    const again = core.frames.filter((frame) => frame.reason).length;
    const breaks = core.frames.reduce((sum, frame) => sum + frame.breaks.length, 0);
    const calls = core.frames.filter((frame) => !frame.id).length;
    const said = [plural(core.frames.length - calls, "compile"), plural(again, "recompile"), plural(breaks, "graph break")];
    if (calls) said.push(plural(calls, "call of a stage as a function", "calls of a stage as a function"));
    const heads = ["", "what was compiled, and why", "programs", ...(threads.size > 1 ? ["thread"] : []), "time to compile"];
    replace(
      this.element,
      h("h2", {}, "What was compiled, in order"),
      h("p", { class: "rest" }, said.join(", ")),
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, core.frames.map((frame) => this.row(frame, core, threads.size > 1))),
      ),
    );
  }

  private row(frame: Frame, core: Core, withThread: boolean): HTMLElement {
    return h(
      "tr",
      {},
      h("td", { class: "id" }, frame.id),
      h(
        "td",
        {},
        h("b", {}, frame.what),
        frame.reason && h("p", { class: "again" }, h("i", {}, "compiled again: "), frame.reason),
        frame.breaks.map(([reason, source, explanation]) =>
          h("details", { class: "break" }, h("summary", {}, h("i", {}, "graph break"), source && ` at ${source}`, ": ", reason), h("pre", {}, explanation)),
        ),
        frame.failure && h("p", { class: "failure" }, h("i", {}, "runs in Python: "), frame.failure),
        compileTimes(frame),
      ),
      h(
        "td",
        { class: "programs" },
        frame.programs.map((program) =>
          h("button", { type: "button", class: "link", title: core.programs[program - 1]?.label, onclick: () => this.go(program) }, `program ${program}`),
        ),
      ),
      withThread && h("td", {}, frame.thread),
      h("td", { class: "time" }, time(frame.seconds), frame.backward > 0 && h("div", {}, `backward ${time(frame.backward)}`)),
    );
  }
}
