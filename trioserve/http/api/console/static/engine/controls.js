/** What an admin may do: pause, empty the cache, end a request, add and remove workers. */

import { serverHasAdminKey } from "../access.js";
import { announce } from "../announcer.js";
import { button, element, write } from "../dom.js";
import { plural } from "../format.js";
import { call } from "../http.js";
import { RemovalDialog } from "./removal.js";

export class Controls {
  areAllowed = false;
  #isPaused = false;
  #pause = button("Pause", () => this.#togglePause());
  #flush = button("Empty the cache", () => this.#flushCache());
  #add = button("Add a worker", () => this.#addWorker());
  #removal = new RemovalDialog((index) => this.#removeWorker(index));
  #said = element("span", { class: "hint", role: "status" });
  #readOnly = element("span", { class: "hint" });
  #askForKey;
  #buttons;

  /** @param {{askForKey: (why: string) => void}} page */
  constructor({ askForKey }) {
    this.#askForKey = askForKey;
    const buttons = [this.#pause, this.#flush, this.#add];
    this.#buttons = element("span", { class: "row", hidden: true }, ...buttons);
    const parts = [this.#buttons, this.#said, this.#readOnly, this.#removal.element];
    this.element = element("div", { class: "controls" }, ...parts);
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

  /** End a worker, once that is confirmed. */
  askToRemove(worker) {
    this.#removal.open(worker);
  }

  async #addWorker() {
    this.#add.disabled = true;
    this.#say("A worker loads the model.");
    await this.#do("/workers", null, ({ index }) => `Worker ${index} serves.`, "POST");
    this.#add.disabled = false;
  }

  async #removeWorker(index) {
    this.#say(`The requests of worker ${index} move to the others.`);
    await this.#do(`/workers/${index}`, null, () => `Worker ${index} has ended.`, "DELETE");
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
  async #do(path, body, sentence, method) {
    try {
      const options = { body: body ?? undefined, method, asAdmin: true };
      this.#say(sentence(await call(path, options)));
    } catch (error) {
      this.#say(error.message);
    }
  }

  #say(text) {
    write(this.#said, text);
    announce(text);
  }
}
