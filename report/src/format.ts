// Numbers as people read them.

const scaled = (value: number, units: [number, string][]): string => {
  const [size, unit] = units.find(([size]) => Math.abs(value) >= size) ?? units[units.length - 1];
  const number = value / size;
  return `${Math.abs(number) >= 100 ? number.toFixed(0) : number.toFixed(1).replace(/\.0$/, "")} ${unit}`;
};

export const bytes = (value: number): string =>
  value === 0 ? "0 B" : scaled(value, [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);

export const time = (seconds: number): string =>
  seconds === 0 ? "0 µs" : scaled(seconds, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]]);

/** A value of which nothing may be known. */
export const known = (value: number | null, show: (value: number) => string): string => (value === null ? "?" : show(value));

/** A sum that leaves out what is not known. */
export const atLeast = (value: number | null, unknown: number | undefined, show: (value: number) => string): string =>
  value === null ? "?" : unknown ? `≥ ${show(value)}` : show(value);

/** Of a share: `7 %`, and where that would be nothing `0.3 %`. */
export const percent = (share: number): string => `${(100 * share).toFixed(share < 0.01 ? 1 : 0)} %`;

export const integer = (value: number): string => value.toLocaleString("en");

export const plural = (count: number, one: string, many = one + "s"): string =>
  `${integer(count)} ${count === 1 ? one : many}`;

export const signed = (value: number, show: (value: number) => string): string =>
  value === 0 ? "±0" : (value > 0 ? "+" : "−") + show(Math.abs(value));
