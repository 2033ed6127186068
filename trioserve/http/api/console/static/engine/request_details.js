/** What is known of one request: its figures, how long it was in each state, and the way to end it. */

import { button, element, list, setAttribute, write } from "../dom.js";
import { count, duration, movesOf, NONE, percent } from "../format.js";
import { spansOf } from "./timeline.js";

const FACTS = [
  ["Id", ({ id }) => id],
  ["Prompt", (r) => `${count(r.prompt_tokens)} tokens, ${count(r.cached_tokens)} from the cache`],
  ["Computed", (r) => `${count(r.computed_tokens)} tokens`],
  ["Output", (r) => `${count(r.output_tokens)} of at most ${count(r.max_tokens)} tokens`],
  ["Outputs", (r) => count(r.outputs)],
  ["Pages", (r) => count(r.pages)],
  ["Worker", (r) => [r.worker ?? NONE, r.moves ? movesOf(r) : ""].filter(String).join(", ")],
  ["Priority", (r) => String(r.priority)],
  ["Adapter", (r) => r.adapter ?? NONE],
  ["Ended", (r) => r.finish_reason ?? "not yet"],
];

export class RequestDetails {
  #values = FACTS.map(() => element("dd"));
  #spans = element("tbody");
  #abort;
  #id = null;

  constructor(controls) {
    this.controls = controls;
    this.#abort = button("Abort", () => controls.abort(this.#id), { class: "stop" });
    const facts = FACTS.map(([name], i) =>
      element("div", {}, element("dt", {}, name), this.#values[i]),
    );
    const head = element(
      "tr",
      {},
      ...["State", "Took", "Share"].map((name) => element("th", { scope: "col" }, name)),
    );
    this.element = element(
      "div",
      { class: "request-details" },
      element("dl", { class: "facts" }, ...facts),
      element("table", { class: "spans" }, element("thead", {}, head), this.#spans),
      this.#abort,
    );
  }

  /** @param {object|undefined} request nothing changes without one: it may just have left */
  show(request, now) {
    if (!request) return;
    this.#id = request.id;
    FACTS.forEach(([, of], i) => write(this.#values[i], of(request)));
    this.#showSpans(spansOf(request.timeline, now));
    this.#abort.hidden = !this.controls.areAllowed || request.state === "finished";
  }

  #showSpans(spans) {
    const whole = spans.reduce((sum, { from, to }) => sum + to - from, 0);
    const rows = spans.map((span, i) => ({ ...span, i }));
    list(
      this.#spans,
      rows,
      ({ i }) => i,
      spanRow,
      (row, { state, from, to }) => {
        const [name, took, share] = row.children;
        setAttribute(name.firstChild, "class", `state state-${state}`);
        write(name.firstChild, state);
        write(took, duration(to - from));
        write(share, whole ? percent((to - from) / whole) : NONE);
      },
    );
  }
}

function spanRow() {
  const name = element("th", { scope: "row" }, element("span"));
  return element("tr", {}, name, element("td"), element("td"));
}
