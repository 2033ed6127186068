/** What an admin may do: pause and resume, empty the cache, end a request. */

import { serverHasAdminKey } from "../access.js";
import { announce } from "../announcer.js";
import { button, element, write } from "../dom.js";
import { plural } from "../format.js";
import { call } from "../http.js";

export class Controls {
  areAllowed = false;
  #isPaused = false;
  #pause = button("Pause", () => this.#togglePause());
  #flush = button("Empty the cache", () => this.#flushCache());
  #said = element("span", { class: "hint", role: "status" });
  #readOnly = element("span", { class: "hint" });
  #askForKey;
  #buttons;

  /** @param {{askForKey: (why: string) => void}} page */
  constructor({ askForKey }) {
    this.#askForKey = askForKey;
    this.#buttons = element("span", { class: "row", hidden: true }, this.#pause, this.#flush);
    this.element = element("div", { class: "controls" }, this.#buttons, this.#said, this.#readOnly);
  }

  /** @param {boolean} areAllowed as the server says of whoever reads the feed */
  allow(areAllowed) {
    this.areAllowed = areAllowed;
    this.#buttons.hidden = !areAllowed;
    this.#readOnly.hidden = areAllowed;
    if (!areAllowed) serverHasAdminKey().then((hasOne) => this.#explain(hasOne));
  }

  #explain(hasAdminKey) {
    const enter = button("Enter the admin key", () => this.#askForKey(""), { class: "link" });
    const why = hasAdminKey ? ["Read-only. ", enter] : ["Read-only: the server has no admin key."];
    this.#readOnly.replaceChildren(...why);
  }

  show({ paused }) {
    this.#isPaused = paused;
    write(this.#pause, paused ? "Resume" : "Pause");
  }

  /** End a request, whoever waits for it. */
  async abort(id) {
    await this.#do("/abort_requests", { request_ids: [id] }, ({ num_aborted: number }) =>
      number ? "The request was aborted." : "There was no such request any more.",
    );
  }

  async #togglePause() {
    if (this.#isPaused) await this.#do("/resume", {}, () => "Requests go on.");
    else await this.#do("/pause", {}, () => "Paused: nothing is computed.");
  }

  async #flushCache() {
    await this.#do(
      "/flush_cache",
      {},
      (reply) => `${plural(reply.num_pages_freed, "page")} freed.`,
    );
  }

  /** Call a route, and say what came of it: `sentence` of its reply, or why it refused. */
  async #do(path, body, sentence) {
    try {
      this.#say(sentence(await call(path, { body, asAdmin: true })));
    } catch (error) {
      this.#say(error.message);
    }
  }

  #say(text) {
    write(this.#said, text);
    announce(text);
  }
}
