/**
 * Server-sent events, from pieces of text as a connection delivers them.
 *
 * EventSource can't send an Authorization header, so the console reads the stream itself. This is
 * the standard's grammar (https://html.spec.whatwg.org/multipage/server-sent-events.html) without
 * `id` and `retry`, which the server doesn't send. Nothing here touches the page or the network.
 */

/** @typedef {{event: string, data: string}} ServerEvent */

export class EventParser {
  #rest = "";
  #event = "";
  #data = [];
  #isFirst = true;

  /**
   * @param {string} text what has come; it may end anywhere
   * @returns {ServerEvent[]} the events that are whole now
   */
  push(text) {
    if (this.#isFirst && text) {
      this.#isFirst = false;
      text = text.replace(/^\uFEFF/, "");
    }
    this.#rest += text;
    // The end of a line may be \r\n, of which only the \r has come.
    const whole = this.#rest.endsWith("\r") ? this.#rest.slice(0, -1) : this.#rest;
    const lines = whole.split(/\r\n|\n|\r/);
    this.#rest = lines.pop() + this.#rest.slice(whole.length);
    return lines.map((line) => this.#line(line)).filter((event) => event !== null);
  }

  /** Take a line in; the event that it ends, or null. */
  #line(line) {
    if (line === "") return this.#dispatch();
    const [, field, value] = /^([^:]*)(?:: ?(.*))?$/s.exec(line);
    if (field === "data") this.#data.push(value ?? "");
    else if (field === "event") this.#event = value ?? "";
    return null;
  }

  #dispatch() {
    const event = { event: this.#event || "message", data: this.#data.join("\n") };
    const hasData = this.#data.length > 0;
    this.#event = "";
    this.#data = [];
    return hasData ? event : null;
  }
}
