/** The worker processes: whether they are there, since when, and that one was replaced. */

import { element, list, setAttribute, write } from "../dom.js";
import { age, plural } from "../format.js";
import { noticeOf, severalOf, summaryOf } from "./scope.js";

const NOTICED = 60; // seconds for which a restart is pointed out

const HEALTH = {
  ok: "Serving",
  draining: "Draining: nothing new is taken",
  no_worker: "No worker: requests wait",
  stalled: "Stalled: nothing advances",
};

export class Worker {
  #state = element("span", { class: "pill" });
  #facts = element("span", { class: "worker-facts" });
  #restart = element("p", { class: "notice notice-restart", role: "status", hidden: true });
  #notices = element("ul", { class: "worker-notices", "aria-live": "polite", hidden: true });

  constructor() {
    this.element = element(
      "div",
      { class: "worker" },
      element("p", { class: "worker-line" }, this.#state, " ", this.#facts),
      this.#restart,
      this.#notices,
    );
  }

  show(picture) {
    const workers = severalOf(picture);
    if (workers.length) this.#showSeveral(picture, workers);
    else this.#showOne(picture);
    this.#showNotices(workers, picture.now);
  }

  #showSeveral({ health, paused, worker, weight_version }, workers) {
    const [tone, text] = summaryOf(workers);
    const isWell = health === "ok";
    const word = this.#word(health, worker.state === "released" ? worker.state : "");
    setAttribute(this.#state, "data-tone", isWell ? (paused ? "warn" : tone) : "bad");
    setAttribute(this.#state, "data-worker", worker.state);
    write(this.#state, isWell ? (paused ? "Paused" : text) : word);
    const facts = [
      isWell && !paused ? null : text,
      plural(worker.restarts, "restart"),
      weight_version ? `weights ${weight_version}` : null,
    ];
    write(this.#facts, facts.filter(Boolean).join(" · "));
    this.#restart.hidden = true;
  }

  /** One line for each worker of which there is something to say. */
  #showNotices(workers, now) {
    const told = workers
      .map((worker) => ({ index: worker.index, state: worker.state, text: noticeOf(worker, now) }))
      .filter(({ text }) => text !== null);
    this.#notices.hidden = told.length === 0;
    list(
      this.#notices,
      told,
      ({ index }) => index,
      () => element("li"),
      (item, { state, text }) => {
        const isBack = state === "running";
        setAttribute(item, "class", isBack ? "notice notice-restart" : "notice");
        write(item, text);
      },
    );
  }

  #showOne({ now, health, paused, worker, weight_version }) {
    const isWell = health === "ok" && worker.state === "running";
    setAttribute(this.#state, "data-tone", isWell ? (paused ? "warn" : "good") : "bad");
    setAttribute(this.#state, "data-worker", worker.state);
    write(this.#state, paused && isWell ? "Paused" : this.#word(health, worker.state));
    write(this.#facts, factsOf(now, worker, weight_version).join(" · "));
    this.#showRestart(now, worker);
  }

  #word(health, state) {
    if (state === "restarting") return "Worker restarting: requests wait";
    if (state === "released") return "Worker sent away";
    return HEALTH[health] ?? health;
  }

  #showRestart(now, { state, restarts, since, last_death }) {
    const seconds = now - since;
    const isBack = state === "running" && restarts > 0 && seconds < NOTICED;
    const why = last_death ? ` (${last_death})` : "";
    if (state === "restarting") {
      write(this.#restart, `The worker was lost${why}. The next one loads; requests go on then.`);
    } else if (isBack) {
      const ago = seconds < 5 ? "just now" : `${5 * Math.floor(seconds / 5)} s ago`;
      write(this.#restart, `The worker was lost${why} and replaced ${ago}. Requests went on.`);
    }
    this.#restart.hidden = !(state === "restarting" || isBack);
  }
}

function factsOf(now, { pid, rank_pids, restarts, since }, weights) {
  return [
    pid === null ? "no process" : `process ${[pid, ...rank_pids].join(", ")}`,
    `for ${age(now - since)}`,
    plural(restarts, "restart"),
    weights ? `weights ${weights}` : null,
  ].filter(Boolean);
}
