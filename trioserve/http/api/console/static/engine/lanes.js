/** How many requests are in each state, as lanes through which they move from left to right. */

import { element, list, setAttribute, write } from "../dom.js";

const MOST_MARKS = 48; // in a lane; the number above says how many there are

/** The lanes, and which states are in them. */
const LANES = [
  ["tokenizing", "Tokenizing"],
  ["encoding", "Encoding"],
  ["waiting", "Waiting"],
  ["prefill", "Prefill"],
  ["decode", "Decode"],
  ["finished", "Finished"],
];

export class Lanes {
  #lanes = new Map();

  /** @param {(id: string) => void} onSelect */
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.element = element("ol", { class: "lanes" });
    for (const [state, label] of LANES) {
      const number = element("span", { class: "lane-number" }, "0");
      const marks = element("div", { class: "lane-marks", "aria-hidden": "true" });
      const head = element("span", { class: `lane-name state state-${state}` }, label);
      // Most models never encode anything.
      const lane = element("li", { class: "lane", hidden: state === "encoding" }, head, number, marks);
      this.element.append(lane);
      this.#lanes.set(state, { lane, number, marks });
    }
  }

  /** @param {object[]} requests those in the picture; @param {string|null} selected an id */
  show(requests, selected) {
    for (const [state, { lane, number, marks }] of this.#lanes) {
      const here = requests.filter((request) => laneOf(request) === state);
      if (here.length) lane.hidden = false;
      write(number, String(here.length));
      list(
        marks,
        here.slice(0, MOST_MARKS),
        ({ id }) => id,
        () => this.#mark(),
        (mark, request) => {
          mark.dataset.id = request.id;
          setAttribute(mark, "class", `mark mark-${request.finish_reason ?? request.state}`);
          setAttribute(mark, "data-selected", request.id === selected);
          setAttribute(mark, "title", request.id);
        },
      );
    }
  }

  #mark() {
    return element("span", { on: { click: ({ target }) => this.onSelect(target.dataset.id) } });
  }
}

/** Whoever was preempted waits again. */
function laneOf({ state }) {
  return state === "preempted" ? "waiting" : state;
}
