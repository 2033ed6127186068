/** A request's row: its state, how far it has come, and its last seconds as bars. */

import { button, element, list, setAttribute, svg, write } from "../dom.js";
import { count, movesOf } from "../format.js";
import { barsOf, progressOf, spansOf } from "./timeline.js";

const WINDOW = 20; // seconds that the bars show, up to now
const WIDTH = 1000; // of the bars' drawing, in its own units
const HEIGHT = 10;

export class RequestRow {
  #state = element("span");
  #tokens = element("span", { class: "request-tokens" });
  #worker = element("span", { class: "request-worker" });
  #progress = element("progress", { max: 1, "aria-label": "Progress" });
  #name;
  #bars = svg("svg", {
    class: "bars",
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });

  constructor(id, onSelect) {
    this.#name = button(shortened(id), onSelect, { class: "request-id", title: id });
    const parts = [
      ...[this.#state, this.#name, this.#worker],
      ...[this.#tokens, this.#progress, this.#bars],
    ];
    this.element = element(
      "li",
      { class: "request", "data-id": id },
      element("div", { class: "request-line" }, ...parts),
    );
  }

  show(request, now, isSelected) {
    setAttribute(this.element, "data-state", request.state);
    setAttribute(this.element, "data-selected", isSelected);
    setAttribute(this.#name, "aria-expanded", String(isSelected));
    const word = request.finish_reason ?? request.state;
    setAttribute(this.#state, "class", `state state-${word}`);
    write(this.#state, word);
    write(this.#tokens, tokensOf(request));
    write(this.#worker, workerOf(request));
    setAttribute(this.#worker, "title", request.moves ? movesOf(request) : null);
    const progress = progressOf(request);
    setAttribute(this.#progress, "value", (progress ?? 0).toFixed(3));
    setAttribute(this.#progress, "data-unknown", progress === null);
    this.#draw(barsOf(spansOf(request.timeline, now), now - WINDOW, now));
  }

  #draw(bars) {
    const create = () => svg("rect", { height: HEIGHT });
    const update = (rect, { state, x, width }) => {
      setAttribute(rect, "class", `bar-${state}`);
      setAttribute(rect, "x", (x * WIDTH).toFixed(1));
      setAttribute(rect, "width", Math.max(width * WIDTH, 1.5).toFixed(1));
    };
    list(this.#bars, bars, (bar) => bars.indexOf(bar), create, update);
  }
}

/** The prompt's tokens, how many of them came from the cache, and those of the output. */
function tokensOf({ prompt_tokens, cached_tokens, output_tokens, max_tokens }) {
  const cached = cached_tokens ? ` (${count(cached_tokens)} cached)` : "";
  const most = max_tokens === null ? "" : ` of ${count(max_tokens)}`;
  return `${count(prompt_tokens)}${cached} → ${count(output_tokens)}${most}`;
}

/** The worker's number, with a mark if the request came to it from another. */
function workerOf({ worker, moves }) {
  if (worker === null || worker === undefined) return "";
  return `${moves ? "→ " : ""}worker ${worker}`;
}

/** The part of an id that tells requests apart. */
function shortened(id) {
  const [, kind, rest] = /^(?:([a-z]+)[-_])?(.*)$/s.exec(id);
  return (kind ? `${kind}-` : "") + (rest.length > 10 ? `${rest.slice(0, 8)}…` : rest);
}
