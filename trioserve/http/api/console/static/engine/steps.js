/** The worker's latest steps: how long each took, what was in it, how long it waited before. */

import { element, list, setAttribute, svg, write } from "../dom.js";
import { count, figure, plural } from "../format.js";
import { niceCeiling } from "./history.js";
import { panel } from "./panel.js";

const MOST = 120;
const HEIGHT = 56;

export class Steps {
  #steps = [];
  #drawing = svg("svg", {
    class: "steps",
    viewBox: `0 0 ${MOST} ${HEIGHT}`,
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  #latest = element("p", { class: "hint" });

  constructor() {
    const { element: section, note } = panel("steps", "Steps", this.#drawing, this.#latest);
    this.element = section;
    this.note = note;
  }

  show({ steps }) {
    const last = this.#steps.at(-1)?.number ?? -1;
    // Numbers begin anew with a new engine.
    if (steps.length && steps.at(-1).number < last) this.#steps = [];
    this.#steps.push(...steps.filter(({ number }) => number > (this.#steps.at(-1)?.number ?? -1)));
    this.#steps.splice(0, this.#steps.length - MOST);
    const most = niceCeiling(Math.max(0, ...this.#steps.map(({ ms }) => ms)));
    write(
      this.note,
      this.#steps.length ? `the latest ${this.#steps.length}, up to ${figure(most)} ms` : "",
    );
    const placed = this.#steps.map((step, i) => ({
      ...step,
      x: MOST - this.#steps.length + i,
      most,
    }));
    list(this.#drawing, placed, ({ number }) => number, newBar, drawBar);
    write(this.#latest, this.#steps.length ? sentence(this.#steps.at(-1)) : "No steps yet.");
  }
}

function newBar() {
  return svg("g", {}, svg("rect", { class: "bar-decode" }), svg("rect", { class: "bar-prefill" }));
}

/** A bar of a step's time, divided as its rows are. */
function drawBar(bar, { x, ms, rows_prefill, rows_decode, most }) {
  const height = (ms / most) * HEIGHT;
  const prefill = (height * rows_prefill) / Math.max(rows_prefill + rows_decode, 1);
  const [decodeBar, prefillBar] = bar.children;
  place(decodeBar, x, HEIGHT - height + prefill, height - prefill);
  place(prefillBar, x, HEIGHT - height, prefill);
}

function place(rect, x, y, height) {
  setAttribute(rect, "x", x + 0.1);
  setAttribute(rect, "width", 0.8);
  setAttribute(rect, "y", y.toFixed(2));
  setAttribute(rect, "height", height.toFixed(2));
}

function sentence({ number, rows_prefill, rows_decode, tokens, ms, idle_ms }) {
  const rows = [
    rows_prefill ? `${count(rows_prefill)} in prefill` : null,
    rows_decode ? `${count(rows_decode)} in decode` : null,
  ].filter(Boolean);
  return (
    `Step ${number}: ${rows.join(", ") || "no rows"}, ${plural(tokens, "token")}, ` +
    `${figure(ms)} ms after ${figure(idle_ms)} ms idle`
  );
}
