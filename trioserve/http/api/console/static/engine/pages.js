/** The page pool: how much of the KV cache is held, cached and free. */

import { element, list, setAttribute, write } from "../dom.js";
import { count, percent, plural } from "../format.js";
import { panel } from "./panel.js";
import { shareCells } from "./waffle.js";

const CELLS = 300;
const KINDS = ["held", "cached", "free"];
const MEANINGS = {
  held: "by requests that run",
  cached: "kept for prompts that begin alike",
  free: "never used, or given back",
};

export class Pages {
  #cells = element("div", { class: "waffle", role: "img" });
  #numbers = new Map();
  #shares = new Map();
  #host = element("p", { class: "hint" });

  constructor() {
    const legend = KINDS.map((kind) => {
      this.#numbers.set(kind, element("dd", { class: "legend-number" }));
      this.#shares.set(kind, element("dd", { class: "legend-share" }));
      const name = element(
        "dt",
        { class: `page-kind page-kind-${kind}`, title: MEANINGS[kind] },
        kind,
      );
      return element("div", {}, name, this.#numbers.get(kind), this.#shares.get(kind));
    });
    const { element: section, note } = panel(
      "pages",
      "Pages",
      this.#cells,
      element("dl", { class: "legend" }, ...legend),
      this.#host,
    );
    this.element = section;
    this.note = note;
  }

  /** @param {number} pageSize tokens in a page */
  show({ pages }, pageSize) {
    const parts = KINDS.map((kind) => pages[kind]);
    write(this.note, `${count(pages.total)} of ${pageSize} tokens each`);
    this.#fill(shareCells(parts, Math.min(CELLS, pages.total)));
    KINDS.forEach((kind, i) => {
      write(this.#numbers.get(kind), count(parts[i]));
      write(this.#shares.get(kind), percent(pages.total ? parts[i] / pages.total : 0));
    });
    const shown = KINDS.map((kind, i) => `${parts[i]} ${kind}`).join(", ");
    setAttribute(this.#cells, "aria-label", `${plural(pages.total, "page")}: ${shown}`);
    const { host_total: places, host_used: used } = pages;
    write(this.#host, places ? `In the host's memory: ${count(used)} of ${count(places)}` : "");
  }

  #fill(shares) {
    const kinds = shares.flatMap((share, i) => Array(share).fill(KINDS[i]));
    list(
      this.#cells,
      kinds.map((kind, i) => ({ kind, i })),
      ({ i }) => i,
      () => element("i"),
      (cell, { kind }) => setAttribute(cell, "class", `cell cell-${kind}`),
    );
  }
}
