/** The prefix tree: which beginnings of prompts are kept, how long they are, who uses them. */

import { element, list, setAttribute, svg, write } from "../dom.js";
import { count, plural } from "../format.js";
import { icicle } from "./icicle.js";
import { panel } from "./panel.js";

const ROW = 14; // pixels
const MOST_ROWS = 24;
const STEPS = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1 };

export class Prefix {
  #drawing = svg("svg", {
    class: "icicle",
    preserveAspectRatio: "none",
    role: "img",
    tabindex: 0,
    on: {
      pointermove: ({ target }) => this.#point(target.dataset?.id),
      keydown: (event) => this.#key(event),
    },
  });
  #said = element("p", { class: "hint", "aria-live": "polite" });
  #boxes = [];
  #pointed = null;

  constructor() {
    const { element: section, note } = panel("prefix", "Prefix tree", this.#drawing, this.#said);
    this.element = section;
    this.note = note;
  }

  show({ prefix }) {
    const { boxes, width, height } = icicle(prefix.nodes);
    this.#boxes = boxes.filter((box) => box.y < MOST_ROWS);
    const rows = Math.min(height, MOST_ROWS);
    const numPages = prefix.nodes.reduce((sum, node) => sum + node.pages, 0);
    const numHidden =
      prefix.num_left_out +
      boxes.slice(this.#boxes.length).reduce((sum, { node }) => sum + node.pages, 0);
    write(
      this.note,
      plural(numPages + prefix.num_left_out, "page") +
        (numHidden ? `, ${count(numHidden)} not drawn` : ""),
    );
    setAttribute(this.#drawing, "viewBox", `0 0 ${Math.max(width, 1)} ${Math.max(rows, 1) * ROW}`);
    setAttribute(this.#drawing, "height", Math.max(rows, 1) * ROW);
    setAttribute(
      this.#drawing,
      "aria-label",
      `${plural(prefix.nodes.length, "run")} of pages; arrow keys go from one to the next`,
    );
    list(
      this.#drawing,
      this.#boxes,
      ({ node }) => node.id,
      () => svg("rect"),
      (rect, box) => this.#draw(rect, box),
    );
    this.#say();
  }

  #draw(rect, { node, x, y, width, height }) {
    rect.dataset.id = node.id;
    setAttribute(rect, "x", x);
    setAttribute(rect, "y", y * ROW + 0.5);
    setAttribute(rect, "width", width);
    setAttribute(rect, "height", Math.min(height, MOST_ROWS - y) * ROW - 1);
    const kind = node.on_host ? "host" : node.users ? "held" : "cached";
    setAttribute(rect, "class", `run run-${kind}`);
    setAttribute(rect, "data-pointed", node.id === this.#pointed);
  }

  #point(id) {
    if (id === undefined) return;
    this.#pointed = Number(id);
    for (const rect of this.#drawing.children) {
      setAttribute(rect, "data-pointed", Number(rect.dataset.id) === this.#pointed);
    }
    this.#say();
  }

  #say() {
    const at = this.#boxes.findIndex(({ node }) => node.id === this.#pointed);
    if (at === -1) {
      write(
        this.#said,
        this.#boxes.length
          ? "Longer to the right; below one another, they differ."
          : "Nothing is kept.",
      );
      return;
    }
    const { node, x } = this.#boxes[at];
    const users = node.users ? `held by ${plural(node.users, "sequence")}` : "cached";
    write(
      this.#said,
      `${plural(node.pages, "page")} behind ${count(x)}: ${node.on_host ? "in the host's memory" : users}`,
    );
  }

  #key(event) {
    const step = STEPS[event.key];
    if (!step || !this.#boxes.length) return;
    event.preventDefault();
    const at = this.#boxes.findIndex(({ node }) => node.id === this.#pointed);
    const next = at === -1 ? 0 : Math.min(Math.max(at + step, 0), this.#boxes.length - 1);
    this.#point(this.#boxes[next].node.id);
  }
}
