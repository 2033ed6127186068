/** A text whose tokens tell their probabilities when the pointer or the focus is on them. */

import { element } from "../dom.js";
import { alternatives } from "./alternatives.js";

const STEPS = { ArrowLeft: -1, ArrowRight: 1 };

export class TokenText {
  /** @type {WeakMap<Element, import("./answer.js").Token[]>} */
  #tokens = new WeakMap();

  constructor() {
    this.element = element("div", {
      class: "text",
      on: {
        pointerover: (event) => this.#show(event.target),
        pointerleave: () => alternatives.hide(),
        focusin: (event) => this.#focused(event.target),
        focusout: () => alternatives.hide(),
        keydown: (event) => this.#key(event),
      },
    });
  }

  /** @param {import("./answer.js").Piece[]} pieces what has been added to the text */
  append(pieces) {
    for (const piece of pieces) this.#appendPiece(piece);
  }

  #appendPiece({ text, tokens }) {
    const last = this.element.lastChild;
    if (tokens.length) {
      const isFirst = this.element.querySelector(".token") === null;
      const token = element(
        "span",
        { class: `token ${rarity(tokens)}`, tabindex: isFirst ? 0 : -1 },
        text,
      );
      this.#tokens.set(token, tokens);
      this.element.append(token);
    } else if (last instanceof Text) last.appendData(text);
    else this.element.append(text);
  }

  #show(target) {
    const tokens = this.#tokens.get(target);
    if (tokens) alternatives.show(target, tokens);
    else alternatives.hide();
  }

  /** The one token that Tab comes back to is that which had the focus last. */
  #focused(target) {
    for (const token of this.element.querySelectorAll(".token[tabindex='0']")) token.tabIndex = -1;
    target.tabIndex = 0;
    this.#show(target);
  }

  #key(event) {
    if (event.key === "Escape" && alternatives.isShown) {
      event.preventDefault();
      alternatives.hide();
    }
    const tokens = [...this.element.querySelectorAll(".token")];
    const ends = { Home: tokens[0], End: tokens.at(-1) };
    const next = ends[event.key] ?? tokens[tokens.indexOf(event.target) + STEPS[event.key]];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }
}

/** A class for how improbable the least probable of the tokens was. */
function rarity(tokens) {
  const probability = Math.min(...tokens.map((token) => token.probability));
  const limit = [0.05, 0.2, 0.5].findIndex((limit) => probability < limit);
  return limit === -1 ? "" : `rare-${limit}`;
}
