// Measured times: of a step, and of each kernel launch in it, beside what was estimated.

import type { Core, KernelData, Profile, Timed, TimedLaunch } from "./data";
import { type Child, h, replace } from "./dom";
import { integer, known, percent, plural, time } from "./format";
import type { Step } from "./history";

const SHOWN = 200;
const NOT_ATTRIBUTED = "not attributed";

/** In the panel of a node: what the kernels take that it ended in. */
export function measuredFacts(kernels: KernelData | null, steps: Step[]): Child {
  const calls = steps.filter((step) => step.kernel >= 0).map((step) => kernels?.calls[step.kernel]);
  return calls.map((call) => {
    if (!call || call.measured === null) return null;
    const others = call.nodes.length > 1 ? `, which computes ${plural(call.nodes.length - 1, "other node")} too` : "";
    return h("p", { class: "facts measured" }, `${time(call.measured)} (measured) in ${call.name}${others}`);
  });
}

export class ProfileView {
  readonly element = h("div", { class: "profile-view", tabindex: -1 });

  static has(core: Core): boolean {
    return Boolean(core.profile);
  }

  show(core: Core): void {
    const { profile } = core;
    if (!profile) return;
    replace(
      this.element,
      h("h2", {}, "A step, measured"),
      h("p", { class: "rest" }, summary(profile)),
      h(
        "div",
        { class: "tables" },
        h("section", {}, h("h2", {}, "By pass and rule"), parts(profile, profile.regions, "made by", false)),
        h("section", {}, h("h2", {}, "By module"), parts(profile, profile.modules, "module", true)),
      ),
      h("section", {}, h("h2", {}, "By kernel launch"), launches(profile)),
    );
    this.element.scrollTop = 0;
  }
}

const total = (profile: Profile): number => (profile.waiting === null ? profile.wall : profile.kernels);

function summary(profile: Profile): string {
  const rounds = `the best of ${plural(profile.rounds, "round")}`;
  const whole = `A step takes ${time(profile.wall)} (${rounds}), of which ${time(profile.kernels)} in kernels`;
  return profile.waiting === null ? `${whole}.` : `${whole}; for ${time(profile.waiting)} the GPU waits for the host.`;
}

const share = (profile: Profile, seconds: number): string => (total(profile) > 0 ? percent(seconds / total(profile)) : "");

function parts(profile: Profile, list: Timed[], name: string, withInner: boolean): HTMLElement {
  const heads = [name, "measured", "", ...(withInner ? ["with inner modules"] : []), "estimated", "launches"];
  const rows = list.map((part): Child[] => [
    part.name,
    time(part.seconds),
    share(profile, part.seconds),
    ...(withInner ? [part.name === NOT_ATTRIBUTED ? "" : time(part.total)] : []),
    part.name === NOT_ATTRIBUTED ? "" : known(part.estimate, time),
    part.launches ? integer(part.launches) : "",
  ]);
  return table(heads, rows);
}

function launches(profile: Profile): Child {
  const sorted = [...profile.launches].sort((a, b) => b.seconds - a.seconds);
  const rest = sorted.slice(SHOWN).reduce((sum, one) => sum + one.seconds, 0);
  const row = (one: TimedLaunch): Child[] => [
    one.name.replace(/^(torch\.ops|extern_kernels)\./, ""),
    time(one.seconds),
    share(profile, one.seconds),
    known(one.estimate, time),
    one.graph,
    one.madeBy,
    one.module,
    one.sources.join(", "),
  ];
  const rows = sorted.slice(0, SHOWN).map(row);
  if (sorted.length > SHOWN) rows.push([plural(sorted.length - SHOWN, "more launch", "more launches"), time(rest), share(profile, rest)]);
  rows.push([NOT_ATTRIBUTED, time(profile.notAttributed), share(profile, profile.notAttributed)]);
  return table(["kernel", "measured", "", "estimated", "graph", "made by", "module", "source"], rows);
}

function table(heads: string[], rows: Child[][]): HTMLElement {
  const fill = (cells: Child[]): Child[] => [...cells, ...Array<Child>(heads.length - cells.length).fill("")];
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, fill(cells).map((cell, index) => (index ? h("td", {}, cell) : h("th", { scope: "row" }, cell)))))),
  );
}
