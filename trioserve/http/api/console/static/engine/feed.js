/**
 * The server's live feed: read while somebody looks, and again after it was cut off.
 *
 * The server gathers nothing while nobody reads, so `stop` is what makes a hidden tab cost nothing.
 */

import { events } from "../http.js";
import { backoff } from "./backoff.js";

const INTERVAL = 0.5; // seconds between two pictures
const SILENCE = 10_000; // milliseconds without a picture after which the connection counts as lost
const REFUSALS = new Set([401, 403, 404]);

/**
 * @typedef {object} Listener
 * @property {(hello: object) => void} hello once a connection
 * @property {(picture: object) => void} picture each interval
 * @property {(state: "off"|"connecting"|"live"|"lost"|"refused", error?: Error) => void} state
 */

export class Feed {
  #reading = null;
  #attempt = 0;

  /** @param {Listener} listener */
  constructor(listener) {
    this.listener = listener;
  }

  get isOn() {
    return this.#reading !== null;
  }

  start() {
    if (this.isOn) return;
    this.#reading = new AbortController();
    this.#attempt = 0;
    this.#keepReading(this.#reading.signal);
  }

  stop() {
    this.#reading?.abort();
    this.#reading = null;
    this.listener.state("off");
  }

  async #keepReading(stopped) {
    let error = null;
    while (!stopped.aborted) {
      this.listener.state(this.#attempt ? "lost" : "connecting", error);
      error = await this.#read(stopped);
      if (stopped.aborted) return;
      this.listener.state(REFUSALS.has(error?.status) ? "refused" : "lost", error);
      if (REFUSALS.has(error?.status)) return;
      await sleep(backoff(this.#attempt++, Math.random()) * 1000, stopped);
    }
  }

  /** Read one connection to its end; the error that ended it, if one did. */
  async #read(stopped) {
    const connection = new AbortController();
    const end = () => connection.abort();
    stopped.addEventListener("abort", end);
    let silence = setTimeout(end, SILENCE);
    try {
      const path = `/console/live?interval=${INTERVAL}`;
      for await (const { event, data } of events(path, {
        signal: connection.signal,
        asAdmin: true,
      })) {
        clearTimeout(silence);
        silence = setTimeout(end, SILENCE);
        this.#take(event, JSON.parse(data));
      }
      return null;
    } catch (error) {
      if (error.name === "AbortError" || error.status !== undefined) return error;
      throw error;
    } finally {
      clearTimeout(silence);
      stopped.removeEventListener("abort", end);
    }
  }

  #take(event, data) {
    if (event === "hello") {
      this.#attempt = 0;
      this.listener.state("live");
      this.listener.hello(data);
    } else if (event === "picture") this.listener.picture(data);
  }
}

/** Wait; less if `stopped` comes first. */
function sleep(milliseconds, stopped) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    stopped.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
