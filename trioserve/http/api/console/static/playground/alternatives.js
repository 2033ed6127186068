/** The small table of what could have been in a token's place. There is one, shown where needed. */

import { element, svg } from "../dom.js";
import { percent } from "../format.js";

const BAR = 72; // a bar's length for a probability of 1, in pixels
const GAP = 6; // between the token and the table, and at the window's edges, in pixels

class Alternatives {
  #panel = element("div", {
    class: "alternatives",
    id: "alternatives",
    role: "tooltip",
    hidden: true,
  });
  #shownFor = null;

  get isShown() {
    return !this.#panel.hidden;
  }

  /**
   * @param {HTMLElement} target the token in the text
   * @param {import("./answer.js").Token[]} tokens what it came from
   */
  show(target, tokens) {
    if (this.#shownFor === target) return;
    this.hide();
    this.#shownFor = target;
    target.setAttribute("aria-describedby", "alternatives");
    this.#panel.replaceChildren(...tokens.map(tableOf));
    this.#panel.hidden = false;
    document.body.append(this.#panel);
    this.#place(target.getClientRects()[0] ?? target.getBoundingClientRect());
  }

  hide() {
    this.#shownFor?.removeAttribute("aria-describedby");
    this.#shownFor = null;
    this.#panel.hidden = true;
  }

  /** Below the token where there is room, else above it. */
  #place(token) {
    const { width, height } = this.#panel.getBoundingClientRect();
    const left = Math.min(token.left, document.documentElement.clientWidth - width - GAP);
    const isRoomBelow = token.bottom + GAP + height < innerHeight;
    const top = isRoomBelow ? token.bottom + GAP : Math.max(token.top - GAP - height, GAP);
    this.#panel.style.left = `${Math.max(left, GAP)}px`;
    this.#panel.style.top = `${top}px`;
  }
}

export const alternatives = new Alternatives();

function tableOf({ text, probability, alternatives: others }) {
  const isAmongThem = others.some((other) => other.text === text);
  const rows = isAmongThem ? others : [...others, { text, probability }];
  return element(
    "table",
    {},
    element("caption", {}, element("code", {}, visible(text)), ` ${percent(probability)}`),
    element("tbody", {}, ...rows.map((row) => rowOf(row, row.text === text))),
  );
}

function rowOf({ text, probability }, isChosen) {
  const width = Math.max(probability * BAR, 1);
  return element(
    "tr",
    { class: isChosen ? "chosen" : null },
    element("th", { scope: "row" }, element("code", {}, visible(text))),
    element("td", {}, percent(probability)),
    element(
      "td",
      { "aria-hidden": "true" },
      svg("svg", { width: BAR, height: 8 }, svg("rect", { width, height: 8, rx: 1 })),
    ),
  );
}

/** A token's text with its white space to be seen. */
function visible(text) {
  const shown = text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return shown || "(empty)";
}
