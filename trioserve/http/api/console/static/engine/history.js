/** Figures of the last few minutes, and the line that draws them. Nothing here touches the page. */

/** @typedef {{at: number, value: number|null}} Point `at` in seconds; null where nothing is known */

const LEAST = 20; // seconds that a drawing shows at least

export class History {
  /** @type {Point[]} */
  points = [];

  /** @param {number} span how long a point is kept, in seconds */
  constructor(span) {
    this.span = span;
  }

  add(at, value) {
    this.points.push({ at, value: value ?? null });
    const first = this.points.findIndex((point) => point.at > at - this.span);
    this.points.splice(0, first);
  }

  /** Seconds that a drawing shows: what there is, once there is enough of it to see anything. */
  get shown() {
    const { points } = this;
    return points.length
      ? Math.min(Math.max(points.at(-1).at - points[0].at, LEAST), this.span)
      : LEAST;
  }

  /** The largest value, 0 if there is none. */
  get peak() {
    return this.points.reduce((most, { value }) => Math.max(most, value ?? 0), 0);
  }

  /**
   * The values as an SVG path in a box of `width` × `height`, the newest at its right edge.
   *
   * @param {number} most the value at the upper edge
   * @param {number} gap seconds between two points past which the line is broken
   */
  path(width, height, most, gap) {
    const now = this.points.at(-1)?.at ?? 0;
    const parts = [];
    let previous = null;
    for (const { at, value } of this.points) {
      if (value === null) {
        previous = null;
        continue;
      }
      const x = round(width * (1 - (now - at) / this.shown));
      const y = round(height * (1 - (most ? Math.min(value / most, 1) : 0)));
      const isJoined = previous !== null && at - previous <= gap;
      parts.push(isJoined ? `L${x} ${y}` : `M${x} ${y}h0.01`);
      previous = at;
    }
    return parts.join("");
  }
}

/** The smallest of 1, 2, 5, 10, 20, 50 … (and 0.1, 0.05 …) that isn't below `value`. */
export function niceCeiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 5, 10].find((step) => step * power >= value * (1 - 1e-9));
  return step * power;
}

function round(number) {
  return Math.round(number * 100) / 100;
}
