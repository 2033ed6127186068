/** The requests: lanes of their states, a row for each with its timeline, details of one. */

import { button, element, list, setAttribute, write } from "../dom.js";
import { count, plural } from "../format.js";
import { Lanes } from "./lanes.js";
import { panel } from "./panel.js";
import { RequestDetails } from "./request_details.js";
import { RequestRow } from "./request_row.js";
import { severalOf } from "./scope.js";
import { inOrder } from "./timeline.js";

const FEW = 8; // rows, until all are asked for
const STEPS = { ArrowUp: -1, ArrowDown: 1 };

export class Requests {
  #picture = null;
  #selected = null;
  #areAllShown = false;
  #byElement = new WeakMap();
  #lanes = new Lanes((id) => this.#select(id));
  #rows = element("ul", { class: "requests", "aria-label": "Requests" });
  #more = button("", () => this.#showMore(), { class: "quiet", hidden: true });
  #rest = element("p", { class: "left-out" });
  #details;

  /** @param {import("./controls.js").Controls} controls */
  constructor(controls) {
    this.#details = new RequestDetails(controls);
    const { element: section, note } = panel(
      "requests",
      "Requests",
      this.#lanes.element,
      this.#rows,
      element("div", { class: "row" }, this.#more, this.#rest),
    );
    this.element = section;
    this.note = note;
    this.#rows.addEventListener("keydown", (event) => this.#key(event));
  }

  show(picture) {
    this.#picture = picture;
    const { requests, counts, scope } = picture;
    write(this.note, scope === null ? totals(counts) : `those of worker ${scope}`);
    setAttribute(this.#rows, "data-several", severalOf(picture).length > 0);
    this.#lanes.show(requests, this.#selected);
    const shown = this.#rowsOf(requests);
    this.#showRows(shown);
    this.#showRest(requests.length - shown.length);
    const selected = requests.find(({ id }) => id === this.#selected);
    if (selected) this.#details.show(selected, picture.now);
  }

  /** The first few, and the one that is selected; or all. */
  #rowsOf(requests) {
    const isShown = ({ id }, i) => this.#areAllShown || i < FEW || id === this.#selected;
    return inOrder(requests).filter(isShown);
  }

  #showRows(requests) {
    const create = ({ id }) => {
      const row = new RequestRow(id, () => this.#select(id));
      this.#byElement.set(row.element, row);
      return row.element;
    };
    const update = (child, request) => {
      const isSelected = request.id === this.#selected;
      this.#byElement.get(child).show(request, this.#picture.now, isSelected);
      if (isSelected && !child.contains(this.#details.element)) child.append(this.#details.element);
    };
    list(this.#rows, requests, ({ id }) => id, create, update);
  }

  #showRest(numFolded) {
    const { requests, num_requests_left_out: numLeftOut } = this.#picture;
    write(this.#more, this.#areAllShown ? "Show fewer" : `Show all ${requests.length}`);
    this.#more.hidden = requests.length <= FEW;
    if (numFolded + numLeftOut) write(this.#rest, `${count(numFolded + numLeftOut)} not shown`);
    else write(this.#rest, requests.length ? "" : "No requests.");
  }

  /** Show a request's details; of the one that is shown, hide them. */
  #select(id) {
    this.#selected = this.#selected === id ? null : id;
    this.#details.element.remove();
    this.show(this.#picture);
  }

  #showMore() {
    this.#areAllShown = !this.#areAllShown;
    this.show(this.#picture);
  }

  #key(event) {
    const step = STEPS[event.key];
    if (!step || !event.target.matches(".request-id")) return;
    event.preventDefault();
    const ids = [...this.#rows.querySelectorAll(".request-id")];
    ids[ids.indexOf(event.target) + step]?.focus();
  }
}

function totals({ finished_total: finished, aborted_total: aborted, errors_total: errors }) {
  const ends = [
    `${count(finished)} finished`,
    `${count(aborted)} aborted`,
    plural(errors, "error"),
  ];
  return `${ends.join(", ")} since the start`;
}
