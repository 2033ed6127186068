/** A message of the chat: its text, and what can be done with it. */

import { copyButton } from "../clipboard.js";
import { button, element } from "../dom.js";
import { mediaList } from "./media.js";

const NAMES = { user: "You", assistant: "Model" };

/**
 * A message that was written by the reader.
 *
 * `onEdit` is called when the text was changed and is sent again; the media stay.
 */
export class UserTurn {
  role = "user";
  #text = element("div", { class: "text" });
  #body = element("div", {}, this.#text);

  /**
   * @param {string} text
   * @param {import("./media.js").Medium[]} media
   * @param {{onEdit: () => void}} actions
   */
  constructor(text, media, { onEdit }) {
    this.text = text;
    this.media = media;
    this.onEdit = onEdit;
    this.#text.append(text);
    this.element = turn(
      "user",
      element("div", {}, media.length ? mediaList(media) : null, this.#body),
      button("Edit", () => this.#edit()),
    );
  }

  #edit() {
    const input = element("textarea", {
      rows: Math.min(this.text.split("\n").length + 1, 12),
      "aria-label": "The message, to be changed",
    });
    input.value = this.text;
    const done = () => this.#body.replaceChildren(this.#text);
    const send = () => {
      done();
      this.text = input.value;
      this.#text.replaceChildren(this.text);
      this.onEdit();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") (event.preventDefault(), done());
      if (event.key === "Enter" && !event.shiftKey) (event.preventDefault(), send());
    });
    const actions = [button("Send again", send, { class: "primary" }), button("Cancel", done)];
    this.#body.replaceChildren(input, element("div", { class: "row" }, ...actions));
    input.focus();
  }
}

/** A message of the model: `view` shows it as it comes. */
export class ModelTurn {
  role = "assistant";
  media = [];

  constructor(view, { onRegenerate, onCurl }) {
    this.view = view;
    this.element = turn(
      "assistant",
      view.element,
      button("Regenerate", onRegenerate),
      copyButton("Copy", () => this.text),
      copyButton("Copy as curl", onCurl),
    );
  }

  get text() {
    return this.view.answer.text;
  }
}

function turn(role, body, ...actions) {
  return element(
    "article",
    { class: `turn turn-${role}`, "aria-label": NAMES[role] },
    element("h3", { class: "turn-role" }, NAMES[role]),
    body,
    element("div", { class: "turn-actions" }, ...actions),
  );
}
