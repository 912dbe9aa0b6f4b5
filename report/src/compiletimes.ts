// Where the time of a compile went: one bar for the forward, one for the backward, each made of phases.

import type { Frame, Phase } from "./data";
import { h } from "./dom";
import { percent, time } from "./format";

const NARROWEST_TITLE = 0.08;

export const hasTimes = (frame: Frame): boolean => frame.times.length > 0;

/** The bars of one compile, on one scale. */
export function compileTimes(frame: Frame): HTMLElement | false {
  if (!hasTimes(frame)) return false;
  const longest = Math.max(total(frame.times), total(frame.backwardTimes));
  return h(
    "div",
    { class: "compile-times" },
    bar("forward", frame.times, longest, frame.backwardTimes.length > 0),
    frame.backwardTimes.length > 0 && bar("backward", frame.backwardTimes, longest, true),
  );
}

const total = (phases: Phase[]): number => phases.reduce((sum, [, , seconds]) => sum + seconds, 0);

function bar(side: string, phases: Phase[], longest: number, named: boolean): HTMLElement {
  const whole = total(phases);
  const said = (([, title, seconds]: Phase): string => `${title} ${time(seconds)}, ${percent(seconds / whole)}`);
  return h(
    "figure",
    { "data-side": side },
    h("figcaption", {}, named && h("b", {}, side), time(whole)),
    h(
      "div",
      { class: "phases", role: "img", "aria-label": phases.map(said).join("; "), style: `width: ${(100 * whole) / longest}%` },
      phases.map((phase) =>
        h(
          "span",
          { class: "phase", "data-phase": phase[0], style: `flex-grow: ${phase[2] / whole}`, title: said(phase) },
          phase[2] >= NARROWEST_TITLE * longest && phase[1],
        ),
      ),
    ),
  );
}
