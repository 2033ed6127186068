/** The latest steps: how long each took, what was in it, how long the worker waited before. */

import { element, list, setAttribute, svg, write } from "../dom.js";
import { count, figure, plural } from "../format.js";
import { niceCeiling } from "./history.js";
import { keyOf, LatestSteps } from "./latest_steps.js";
import { panel } from "./panel.js";
import { severalOf } from "./scope.js";

const MOST = 120;
const HEIGHT = 56;

export class Steps {
  #kept = new LatestSteps(MOST);
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

  /** @param {object} scoped a picture, or one worker's part of it */
  show(scoped) {
    this.#kept.add(scoped);
    const steps = this.#kept.of(scoped.scope);
    const most = niceCeiling(Math.max(0, ...steps.map(({ ms }) => ms)));
    write(this.note, steps.length ? `the latest ${steps.length}, up to ${figure(most)} ms` : "");
    const placed = steps.map((step, i) => ({ ...step, x: MOST - steps.length + i, most }));
    list(this.#drawing, placed, keyOf, newBar, drawBar);
    const isNamed = scoped.scope !== null || severalOf(scoped).length > 0;
    const latest = steps.at(-1);
    write(this.#latest, latest ? sentence(latest, isNamed) : "No steps yet.");
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

function sentence({ number, worker, rows_prefill, rows_decode, tokens, ms, idle_ms }, isNamed) {
  const rows = [
    rows_prefill ? `${count(rows_prefill)} in prefill` : null,
    rows_decode ? `${count(rows_decode)} in decode` : null,
  ].filter(Boolean);
  const place = isNamed ? ` of worker ${worker}` : "";
  return (
    `Step ${number}${place}: ${rows.join(", ") || "no rows"}, ${plural(tokens, "token")}, ` +
    `${figure(ms)} ms after ${figure(idle_ms)} ms idle`
  );
}
