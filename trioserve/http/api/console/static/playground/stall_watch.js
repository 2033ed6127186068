/** Watches a stream that has stopped, and asks the server why. */

import { addressOf } from "../address.js";

const STALL = 2000; // milliseconds without an event

const RESTARTING = "The worker is being restarted. The answer will go on where it stopped.";

export class StallWatch {
  #onNote;
  #timer = null;
  #hasNote = false;

  /** @param {(note: string) => void} onNote told why nothing comes, and "" when that is over */
  constructor(onNote) {
    this.#onNote = onNote;
    this.received();
  }

  /** An event has come. */
  received() {
    if (this.#hasNote) this.#tell("");
    this.#restart();
  }

  /** The stream has ended. */
  end() {
    clearTimeout(this.#timer);
    this.#timer = null;
    if (this.#hasNote) this.#tell("");
  }

  #restart() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), STALL);
  }

  async #ask() {
    const asked = this.#timer;
    const health = await fetch(addressOf("/health"), { cache: "no-store" })
      .then((response) => (response.ok ? null : response.json()))
      .catch(() => null);
    if (this.#timer !== asked) return; // An event has come meanwhile, or the end.
    this.#tell(health?.status === "no_worker" ? RESTARTING : "");
    this.#restart();
  }

  #tell(note) {
    this.#hasNote = note !== "";
    this.#onNote(note);
  }
}
