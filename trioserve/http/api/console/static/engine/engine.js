/** The live picture of the engine: the feed, and the panels that it fills. */

import { button, element, setAttribute, write } from "../dom.js";
import { currentView } from "../views.js";
import { Controls } from "./controls.js";
import { Feed } from "./feed.js";
import { Figures } from "./figures.js";
import { Pages } from "./pages.js";
import { Prefix } from "./prefix.js";
import { Requests } from "./requests.js";
import { scopeTo } from "./scope.js";
import { Steps } from "./steps.js";
import { Tasks } from "./tasks.js";
import { Worker } from "./worker.js";
import { Workers } from "./workers.js";

const STATES = {
  off: ["off", ""],
  connecting: ["wait", "Connecting"],
  live: ["good", "Live"],
  lost: ["bad", "Cut off: trying again"],
  refused: ["bad", ""],
};

export class Engine {
  #hello = null;
  #picture = null;
  #chosen = null;
  #controls;
  #worker = new Worker();
  #workers;
  #figures = new Figures();
  #panels;
  #pages = new Pages();
  #state = element("p", { class: "pill", role: "status", id: "feed" });
  #about = element("p", { class: "engine-about" });
  #body;
  #refusal = element("div", { class: "notice", role: "alert", hidden: true });
  #feed = new Feed({
    hello: (hello) => this.#greet(hello),
    picture: (picture) => this.#show(picture),
    state: (name, error) => this.#showState(name, error),
  });

  /**
   * @param {HTMLElement} place where it is shown
   * @param {{askForKey: (why: string) => void}} page
   */
  constructor(place, { askForKey }) {
    this.askForKey = askForKey;
    this.#controls = new Controls({ askForKey });
    this.#workers = new Workers(this.#controls, (index) => this.#choose(index));
    const [requests, prefix] = [new Requests(this.#controls), new Prefix()];
    const [tasks, steps] = [new Tasks(), new Steps()];
    this.#panels = [requests, prefix, tasks, steps, this.#controls];
    this.#body = element(
      "div",
      { class: "engine-body", hidden: true },
      element("div", { class: "engine-top" }, this.#worker.element, this.#controls.element),
      this.#workers.element,
      this.#figures.element,
      element(
        "div",
        { class: "panels" },
        element("div", { class: "panels-main" }, requests.element, tasks.element),
        element(
          "div",
          { class: "panels-side" },
          steps.element,
          this.#pages.element,
          prefix.element,
        ),
      ),
    );
    const title = element("h2", { class: "unseen" }, "Engine");
    const head = element("div", { class: "engine-head" }, title, this.#about, this.#state);
    place.append(head, this.#refusal, this.#body);
  }

  /** Read the feed while it is looked at: the tab is visible, and so is this part of the page. */
  lookOrLeave() {
    const isLookedAt = document.visibilityState === "visible" && currentView() !== "playground";
    if (!isLookedAt) this.#feed.stop();
    else this.#feed.start();
  }

  /** Begin anew, with the keys that hold now. */
  reconnect() {
    this.#feed.stop();
    this.lookOrLeave();
  }

  #greet(hello) {
    this.#hello = hello;
    this.#controls.allow(hello.may_control);
    const frontEnds = hello.front_ends > 1 ? [`${hello.front_ends} front ends`] : [];
    write(
      this.#about,
      [hello.model, hello.device, ...frontEnds, `trioserve ${hello.version}`].join(" · "),
    );
  }

  #show(picture) {
    this.#body.hidden = false;
    this.#refusal.hidden = true;
    this.#picture = picture;
    this.#worker.show(picture);
    this.#figures.add(picture);
    this.#showScope();
  }

  /** Look at one worker alone, or at all of them again. */
  #choose(index) {
    this.#chosen = index;
    this.#showScope();
  }

  #showScope() {
    const scoped = scopeTo(this.#picture, this.#chosen);
    this.#chosen = scoped.scope;
    this.#workers.show(this.#picture, this.#chosen);
    this.#figures.show(scoped);
    for (const panel of this.#panels) panel.show(scoped);
    this.#pages.show(scoped, this.#hello.page_size);
  }

  #showState(name, error) {
    const [tone, text] = STATES[name];
    setAttribute(this.#state, "data-tone", tone);
    setAttribute(this.#state, "data-feed", name);
    write(this.#state, name === "lost" && error?.status ? `${error.reason}: trying again` : text);
    setAttribute(this.#body, "data-stale", name === "lost" || name === "refused");
    if (name === "refused") this.#showRefusal(error);
  }

  #showRefusal(error) {
    const ways =
      error.status === 404 ? [] : [" ", button("Enter a key", () => this.askForKey(error.message))];
    this.#refusal.replaceChildren(error.message, ...ways);
    this.#refusal.hidden = false;
    this.#body.hidden = true;
  }
}
