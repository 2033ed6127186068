/** How fast an answer comes, as its reader sees it. Nothing here touches the page or a clock. */

export class Speed {
  #start;
  #first = null;
  #last = null;

  /** @param {number} now when the request was sent, in seconds */
  constructor(now) {
    this.#start = now;
  }

  /** Text has come. */
  received(now) {
    this.#first ??= now;
    this.#last = now;
  }

  /** Seconds to the first token; null while there is none. */
  get timeToFirstToken() {
    return this.#first === null ? null : this.#first - this.#start;
  }

  /**
   * Tokens a second from the first one on; null while there is but one.
   *
   * @param {number} numTokens how many have come
   */
  rate(numTokens) {
    const seconds = this.#last - this.#first;
    return numTokens > 1 && seconds > 0 ? (numTokens - 1) / seconds : null;
  }
}
