/** A raw completion: a prompt as the model sees it, and how it goes on. */

import { copyButton } from "../clipboard.js";
import { button, element } from "../dom.js";
import { AnswerView } from "./answer_view.js";
import { completionRequest } from "./requests.js";

export class Completion {
  #empty = element(
    "p",
    { class: "empty" },
    "The prompt goes to the model as it is, without a template.",
  );

  /** @param {import("./chat.js").Chat["playground"]} playground */
  constructor(playground) {
    this.playground = playground;
    this.input = element("textarea", {
      id: "prompt",
      rows: 6,
      placeholder: "Once upon a time",
      "aria-label": "Prompt",
      on: { keydown: (event) => this.#key(event) },
    });
    this.composer = this.input;
    this.output = element("div", { class: "output" }, this.#empty);
  }

  /** Have the prompt completed. */
  submit() {
    const prompt = this.input.value;
    if (!prompt) return;
    const request = completionRequest(this.playground.settings(), prompt);
    const view = new AnswerView();
    this.output.replaceChildren(
      element(
        "article",
        { class: "turn turn-completion", "aria-label": "Completion" },
        element("h3", { class: "turn-role" }, "Completion"),
        element("div", { class: "text prompt" }, prompt),
        view.element,
        element(
          "div",
          { class: "turn-actions" },
          button("Go on from here", () => this.#goOn(prompt + view.answer.text)),
          copyButton("Copy", () => prompt + view.answer.text),
          copyButton("Copy as curl", () => this.playground.curl(request)),
        ),
      ),
    );
    this.playground.run(request, view);
  }

  clear() {
    this.output.replaceChildren(this.#empty);
    this.input.value = "";
  }

  #goOn(prompt) {
    this.input.value = prompt;
    this.submit();
  }

  #key(event) {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    this.submit();
  }
}
