/** An answer on the page: its text as it comes, how fast it came, why it ended. */

import { StreamAnnouncer } from "../announcer.js";
import { button, element, write } from "../dom.js";
import { duration, figure, plural } from "../format.js";
import { Answer } from "./answer.js";
import { Speed } from "./speed.js";
import { TokenText } from "./tokens.js";

const ENDS = {
  stop: "ended by the model or a stop string",
  length: "ended by max tokens or the context",
  abort: "aborted by the server",
  stopped: "stopped",
};

export class AnswerView {
  answer = new Answer();
  #speed = new Speed(now());
  #announcer = new StreamAnnouncer();
  #reasoning = new TokenText();
  #content = new TokenText();
  #reasoningFold = element(
    "details",
    { class: "reasoning", open: true, hidden: true },
    element("summary", {}, "Reasoning"),
    this.#reasoning.element,
  );
  #error = element("p", { class: "notice", role: "alert", hidden: true });
  #status = element("p", { class: "answer-status" }, "Waiting for the first token");
  #note = element("p", { class: "hint", role: "status" });

  constructor() {
    this.element = element(
      "div",
      { class: "answer", "aria-busy": "true" },
      this.#reasoningFold,
      this.#content.element,
      this.#error,
      this.#note,
      this.#status,
    );
  }

  /** Take in an event of the stream. */
  add(chunk) {
    const pieces = this.answer.add(chunk);
    if (!pieces.length) return;
    this.#speed.received(now());
    const reasoning = pieces.filter(({ kind }) => kind === "reasoning");
    const content = pieces.filter(({ kind }) => kind === "content");
    if (reasoning.length) this.#reasoningFold.hidden = false;
    this.#reasoning.append(reasoning);
    this.#content.append(content);
    this.#announcer.add(content.map(({ text }) => text).join(""));
    write(this.#status, this.#figures().join(" · "));
  }

  /** Show why nothing comes for the moment; an empty text for no reason. */
  note(text) {
    write(this.#note, text);
  }

  /** @param {string|null} [reason] why it ended, where the server hasn't said it */
  end(reason = this.answer.finishReason) {
    this.element.removeAttribute("aria-busy");
    const end = ENDS[reason] ?? reason;
    write(this.#status, [...this.#figures(), end].filter(Boolean).join(" · "));
    this.#announcer.end(end ? `Answer ${end}.` : "");
  }

  /** @param {import("../http.js").ServerError} error why there is no more of it */
  fail(error, askForKey) {
    const field = error.param ? [element("code", {}, error.param), ": "] : [];
    this.#error.replaceChildren(...field, error.reason);
    if (error.status === 401) {
      this.#error.append(
        " ",
        button("Enter a key", () => askForKey(error.message)),
      );
    }
    this.#error.hidden = false;
    this.end("failed");
  }

  #figures() {
    const { timeToFirstToken } = this.#speed;
    if (timeToFirstToken === null) return [];
    const { numTokens } = this.answer;
    const rate = this.#speed.rate(numTokens);
    return [
      plural(numTokens, "token"),
      `first after ${duration(timeToFirstToken)}`,
      rate === null ? null : `${figure(rate)} tokens/s`,
    ].filter(Boolean);
  }
}

function now() {
  return performance.now() / 1000;
}
