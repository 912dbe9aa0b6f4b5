// When each graph computes and when it communicates with other ranks, by the cost model: before and after stage 3.

import type { Core, Interval, Timeline, Timelines } from "./data";
import { h, replace, svg } from "./dom";
import { bytes, plural, time } from "./format";

const WIDTH = 1000;
const NAMES = 96;
const LANE = 24;
const GAP = 6;
const NARROWEST = 0.75;
const LANES: Interval["lane"][] = ["computation", "communication"];

export class TimelineView {
  readonly element = h("div", { class: "timeline-view", tabindex: -1 });

  static has(core: Core): boolean {
    return (core.timelines ?? []).length > 0;
  }

  show(core: Core, program: number): void {
    const own = core.timelines.filter((both) => both.program === program);
    replace(
      this.element,
      own.length
        ? own.map((both) => this.graph(both))
        : h("p", { class: "empty" }, "The graphs of this program do not communicate with other ranks."),
    );
  }

  private graph({ graph, before, after }: Timelines): HTMLElement[] {
    const scale = Math.max(before.seconds, after.seconds) || 1;
    return [h("h2", {}, `${graph} graph, in time (modelled)`), this.side("before", before, scale), this.side("after", after, scale)];
  }

  private side(name: string, timeline: Timeline, scale: number): HTMLElement {
    const kinds = Object.entries(timeline.collectives).map(([kind, count]) => `${count} ${kind}`);
    const total = Object.values(timeline.collectives).reduce((sum, count) => sum + count, 0);
    const said = `${plural(total, "collective")} (${kinds.join(", ")}); ${time(timeline.seconds)}, of which ${time(timeline.exposed)} only communication`;
    return h("figure", { "data-side": name }, h("figcaption", {}, h("b", {}, name), said), drawing(name, timeline, scale));
  }
}

function drawing(name: string, timeline: Timeline, scale: number): SVGElement {
  const x = (seconds: number): number => NAMES + (seconds / scale) * (WIDTH - NAMES);
  const top = (lane: Interval["lane"]): number => LANES.indexOf(lane) * (LANE + GAP);
  const lanes = LANES.flatMap((lane) => [
    svg("text", { class: "lane-name", x: 0, y: top(lane) + LANE / 2 + 4 }, lane),
    svg("rect", { class: "lane", x: NAMES, y: top(lane), width: WIDTH - NAMES, height: LANE }),
  ]);
  const intervals = timeline.intervals.map((interval) =>
    svg(
      "rect",
      {
        class: `interval ${interval.lane}`,
        x: x(interval.start),
        y: top(interval.lane) + 2,
        width: Math.max(NARROWEST, x(interval.seconds) - NAMES),
        height: LANE - 4,
      },
      svg("title", {}, title(interval)),
    ),
  );
  const end = svg("text", { class: "tick", x: x(timeline.seconds), y: 2 * (LANE + GAP) + 9 }, time(timeline.seconds));
  return svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${2 * (LANE + GAP) + 14}`, role: "img", "aria-label": `${name}: computation and communication in time` },
    ...lanes, ...intervals, end,
  );
}

function title({ lane, what, node, nodes, seconds, start, bytes: size }: Interval): string {
  const where = lane === "communication" ? `${what}, ${bytes(size)}: ${node}` : `${plural(nodes, "operation")}, the longest ${what}: ${node}`;
  return `${where}\n${time(seconds)} from ${time(start)}`;
}
