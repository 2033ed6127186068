/** Numbers as people read them. Nothing here touches the page. */

/** What stands for a figure that isn't known. */
export const NONE = "–";

/** A count with thin groups of digits: 1234567 → "1 234 567". */
export function count(number) {
  if (number === null || number === undefined) return NONE;
  return String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, "\u2009");
}

/** A figure with about three digits: 0.123, 4.56, 78.9, 1 234. */
export function figure(number) {
  if (number === null || number === undefined) return NONE;
  if (number === 0) return "0";
  const digits = Math.floor(Math.log10(Math.abs(number)));
  return digits >= 2 ? count(number) : number.toFixed(Math.min(3, 2 - digits));
}

/** Seconds, in the unit that suits them, as [number, unit]. */
export function durationParts(seconds) {
  if (seconds === null || seconds === undefined) return [NONE, ""];
  if (seconds < 0.0995) return [figure(seconds * 1000), "ms"];
  if (seconds < 1) return [String(Math.round(seconds * 1000)), "ms"];
  if (seconds < 60) return [seconds.toFixed(seconds < 10 ? 2 : 1), "s"];
  if (seconds < 3600) return [`${Math.floor(seconds / 60)}:${twoDigits(seconds % 60)}`, "min"];
  return [`${Math.floor(seconds / 3600)}:${twoDigits((seconds % 3600) / 60)}`, "h"];
}

/** The same as one string: "12.3 ms". */
export function duration(seconds) {
  return durationParts(seconds).join("\u202f").trim();
}

/** A time since something, to the second: nobody reads more of what grows. */
export function age(seconds) {
  return seconds < 60 ? `${Math.max(Math.floor(seconds), 0)}\u202fs` : duration(seconds);
}

/** A share of one, in percent: 0.0123 → "1.2 %". */
export function percent(share) {
  if (share === null || share === undefined) return NONE;
  const value = share * 100;
  return `${value > 0 && value < 9.95 ? value.toFixed(1) : Math.round(value)}\u202f%`;
}

/** "1 page", "2 pages". */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** How often a request went to another worker: "moved once", "moved 2 times". */
export function movesOf({ moves }) {
  return moves === 1 ? "moved once" : `moved ${count(moves)} times`;
}

function twoDigits(number) {
  return String(Math.floor(number)).padStart(2, "0");
}
