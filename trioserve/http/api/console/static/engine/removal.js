/** The question before a worker is removed. */

import { button, element, write } from "../dom.js";
import { plural } from "../format.js";

export class RemovalDialog {
  #title = element("h2");
  #what = element("p");
  #index = null;

  /** @param {(index: number) => void} onConfirm */
  constructor(onConfirm) {
    const confirm = () => {
      this.element.close();
      onConfirm(this.#index);
    };
    this.element = element(
      "dialog",
      { class: "dialog", id: "removal", "aria-label": "Remove a worker" },
      this.#title,
      this.#what,
      element(
        "div",
        { class: "row" },
        button("Remove", confirm, { class: "stop" }),
        button("Cancel", () => this.element.close(), { class: "quiet", autofocus: true }),
      ),
    );
  }

  open({ index, running, waiting }) {
    this.#index = index;
    const requests = running + waiting;
    write(this.#title, `Remove worker ${index}?`);
    write(
      this.#what,
      (requests ? `Its ${plural(requests, "output")} go on with the other workers. ` : "") +
        "Then its process ends, and its cached pages are lost.",
    );
    this.element.showModal();
  }
}
