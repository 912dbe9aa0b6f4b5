// The flow as a picture: every point between the captured program and the kernels, with the size of its graph.

import type { Box } from "./data";
import { h } from "./dom";
import { atLeast, bytes, integer, plural, time } from "./format";

const MEANING: Record<string, string> = {
  dynamo: "The program as Dynamo captured it",
  pre_grad: "After the pre-grad passes: torch operations, before autograd",
  autograd: "What AOTAutograd traced: ATen operations, forward and backward in one graph",
  joint: "After the joint passes",
  partition: "Cut into a forward and a backward graph",
  post_grad: "After the post-grad passes, as code generation gets it",
  kernels: "Kernels that run, in place of nodes",
};

export function flow(boxes: Box[], choose: (box: Box, index: number) => void): HTMLElement {
  const columns: HTMLElement[] = [];
  let last = "";
  boxes.forEach((box, index) => {
    const estimate = box.kernels
      ? "estimated from what each kernel reads and writes, unless the time is called measured"
      : "estimated as if each operation ran alone";
    const element = h(
      "button",
      {
        type: "button",
        class: "box",
        "data-key": box.key,
        "data-index": index,
        "aria-pressed": "false",
        title: `${MEANING[box.key] ?? ""}. Bytes and time are ${estimate}.`,
        onclick: () => choose(box, index),
      },
      box.side && h("span", { class: "side" }, box.side),
      h("span", { class: "count" }, h("b", {}, integer(box.nodes)), box.kernels ? " kernels" : " nodes"),
      h("span", { class: "detail" }, atLeast(box.gemms, box.unknown, (count) => plural(count, "GEMM"))),
      h("span", { class: "detail" }, atLeast(box.bytes, box.unknown, bytes)),
      h("span", { class: "detail" }, box.measured != null ? `${time(box.measured)} measured` : `≈ ${atLeast(box.seconds, box.unknown, time)}`),
      box.unknown ? h("span", { class: "detail", title: "The estimates leave them out." }, `${plural(box.unknown, "launch", "launches")} unknown`) : null,
    );
    if (box.key === last) {
      columns[columns.length - 1].append(element);
      return;
    }
    last = box.key;
    columns.push(h("li", { class: "point" }, h("h3", {}, box.label), element));
  });
  const note = "Bytes and times are estimates by a simple model of the device: of a graph as if each operation ran alone, of kernels by what each reads and writes.";
  return h("div", {}, h("ol", { class: "flow", "aria-label": "The flow from the captured program to kernels" }, columns), h("p", { class: "flow-note" }, note));
}
