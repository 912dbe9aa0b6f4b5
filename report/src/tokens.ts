// A line of a listing as an element, with the tokens marked in which it differs from the line beside it.

import { diffArrays } from "diff";
import { type Child, h } from "./dom";
import type { Graphs } from "./graphs";

const TOKEN = /[A-Za-z_][\w.]*|-?\d+(?:\.\d+)?(?:e-?\d+)?|\s+|'[^']*'|./g;

const tokens = (text: string): string[] => text.match(TOKEN) ?? [];

/** The tokens of `text`, those marked that `other` does not have at their place. */
function marked(text: string, other: string | null, side: "left" | "right"): Child[] {
  if (other === null || other === text) return [text];
  const [before, after] = side === "left" ? [text, other] : [other, text];
  return diffArrays(tokens(before), tokens(after)).flatMap((part) => {
    const own = side === "left" ? !part.added : !part.removed;
    if (!own) return [];
    const words = part.value.join("");
    return [part.added || part.removed ? h("mark", {}, words) : words];
  });
}

const LONGEST = 1500;

/** One line; `withRule` names the rule that created the node, which says something only where it is news. */
export function lineElement(
  graphs: Graphs,
  line: number,
  other: number,
  side: "left" | "right",
  withRule = true,
): HTMLElement {
  const compared = other >= 0 && graphs.name(other) === graphs.name(line);
  const versus = (read: (line: number) => string): string | null => (compared ? read(other) : null);
  const name = graphs.name(line);
  const type = graphs.type(line);
  const call = graphs.call(line);
  const source = graphs.source(line);
  const rule = withRule ? graphs.rule(line) : "";
  const isOutput = name === "output" && !type;
  const title = graphs.title(line);
  const shown = title !== name ? "input" : call.length > LONGEST ? call.slice(0, LONGEST) + " …" : call;
  const otherCall = title !== name ? null : versus(graphs.call);
  return h(
    "span",
    { class: "line" },
    h("b", { class: "name", title: title !== name && name }, isOutput ? "return" : title),
    type && h("span", { class: "type" }, ": ", marked(type, versus(graphs.type), side)),
    isOutput ? " " : " = ",
    h("span", { class: "call" }, marked(shown, otherCall && otherCall.slice(0, LONGEST), side)),
    source && h("span", { class: "source" }, `  ${source}`),
    rule && h("span", { class: "rule" }, "  ← ", compared && graphs.rule(other) !== rule ? h("mark", {}, rule) : rule),
  );
}
