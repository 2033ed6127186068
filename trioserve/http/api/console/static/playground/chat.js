/** A conversation: its messages, and the place where the next one is written. */

import { element } from "../dom.js";
import { AnswerView } from "./answer_view.js";
import { Attachments } from "./attachments.js";
import { chatRequest } from "./requests.js";
import { ModelTurn, UserTurn } from "./turn.js";

export class Chat {
  #turns = [];
  /** The message that the server refused last, if it wasn't sent again. */
  #refused = null;
  #log = element("div", { class: "turns" });
  #attachments;
  #empty = element(
    "p",
    { class: "empty" },
    "Write to the model. Its answer streams in; point at a token, or walk through them with the " +
      "arrow keys, to see what else it might have said.",
  );

  /**
   * @param {object} playground
   * @param {() => import("./requests.js").Settings} playground.settings
   * @param {(request: object, view: AnswerView) => Promise<boolean>} playground.run resolves to
   *   whether the server refused the request
   * @param {(request: object) => string} playground.curl
   * @param {(message: string) => void} playground.say
   */
  constructor(playground) {
    this.playground = playground;
    this.input = element("textarea", {
      id: "message",
      rows: 2,
      placeholder: "Write a message",
      "aria-label": "Message",
      on: { keydown: (event) => this.#key(event) },
    });
    this.#attachments = new Attachments(playground.say);
    this.composer = element("div", {}, this.input, this.#attachments.element);
    this.#attachments.accept(this.composer);
    this.output = element("div", { class: "output" }, this.#empty, this.#log);
  }

  /** @param {"image"|"audio"|null} kind what may be attached, if anything */
  offerMedia(kind) {
    this.#attachments.offer(kind);
  }

  /** Send what was written, with its media. */
  async submit() {
    await this.#attachments.settled();
    const { media } = this.#attachments;
    const text = this.input.value.trim();
    if (!text && !media.length) return;
    this.input.value = "";
    this.#attachments.show([]);
    this.#dropRefused();
    const turn = new UserTurn(text, media, { onEdit: () => this.#answerTo(turn) });
    this.#add(turn);
    this.#answer();
  }

  /** Put a refused message back to where it was written, to be changed. The next one replaces it. */
  #takeBack() {
    const turn = this.#turns.findLast(({ role }) => role === "user");
    this.#refused = turn;
    if (this.input.value || this.#attachments.media.length) return;
    this.input.value = turn.text;
    this.#attachments.show(turn.media);
  }

  #dropRefused() {
    if (this.#refused) this.#cut(this.#turns.indexOf(this.#refused));
  }

  clear() {
    this.#refused = null;
    this.#cut(0);
    this.#empty.hidden = false;
  }

  #answerTo(turn) {
    this.#cut(this.#turns.indexOf(turn) + 1);
    this.#answer();
  }

  async #answer() {
    this.#refused = null;
    const turns = this.#turns.filter(({ text, media }) => text || media.length);
    const request = chatRequest(this.playground.settings(), turns);
    const turn = new ModelTurn(new AnswerView(), {
      onRegenerate: () => this.#regenerate(turn),
      onCurl: () => this.playground.curl(request),
    });
    this.#add(turn);
    const isRefused = await this.playground.run(request, turn.view);
    if (isRefused && this.#turns.at(-1) === turn) this.#takeBack();
  }

  #regenerate(turn) {
    this.#cut(this.#turns.indexOf(turn));
    this.#answer();
  }

  #add(turn) {
    this.#empty.hidden = true;
    this.#turns.push(turn);
    this.#log.append(turn.element);
    turn.element.scrollIntoView({ block: "end" });
  }

  /** Leave out the turns from the `length`-th on. */
  #cut(length) {
    for (const turn of this.#turns.splice(length)) turn.element.remove();
  }

  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.submit();
  }
}
