/** Telling screen readers, without talking all the time. */

import { cutSentences } from "./playground/sentences.js";

const PAUSE = 4000; // milliseconds between two announcements of a text that grows

/** Say something once. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** Says a text that grows in whole sentences, and seldom. */
export class StreamAnnouncer {
  #untold = "";
  #timer = null;

  add(text) {
    this.#untold += text;
    this.#timer ??= setTimeout(() => this.#tell(), PAUSE);
  }

  /** Say the rest, and how it ended. */
  end(outcome) {
    clearTimeout(this.#timer);
    announce(`${this.#untold.trim()} ${outcome}`.trim());
  }

  #tell() {
    this.#timer = null;
    const [sentences, rest] = cutSentences(this.#untold);
    this.#untold = rest;
    if (sentences) announce(sentences);
  }
}
