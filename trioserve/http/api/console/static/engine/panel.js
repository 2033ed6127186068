/** The frame that every part of the engine's picture has: a heading, a note beside it, a body. */

import { element } from "../dom.js";

let number = 0;

/**
 * @param {string} name also its class: "panel-<name>"
 * @param {string} title
 * @param {...Node} children
 * @returns {{element: HTMLElement, note: HTMLElement}} `note` is for a line beside the heading
 */
export function panel(name, title, ...children) {
  const id = `panel-${++number}`;
  const note = element("p", { class: "panel-note" });
  const head = element("div", { class: "panel-head" }, element("h3", { id }, title), note);
  const section = element(
    "section",
    { class: `panel panel-${name}`, "aria-labelledby": id },
    head,
    ...children,
  );
  return { element: section, note };
}
