/** The workers: a row for each, the choice of one to be looked at alone, and the way to end it. */

import { button, element, list, setAttribute, svg, write } from "../dom.js";
import { age, count, duration, figure, NONE, percent, plural } from "../format.js";
import { panel } from "./panel.js";
import { isInTrouble, severalOf, summaryOf } from "./scope.js";

const STEPS = { ArrowUp: -1, ArrowDown: 1 };
const TONES = { running: "good", starting: "warn", draining: "warn", released: "warn" };
const WORDS = {
  starting: "loading",
  restarting: "lost",
  ended: "given up",
  released: "sent away",
  draining: "draining",
};

/** The columns of figures: a class, a heading, and the text. */
const FIGURES = [
  ["running", "Running", ({ running }) => count(running)],
  ["waiting", "Waiting", ({ waiting }) => count(waiting)],
  ["step", "Step", ({ rates }) => milliseconds(rates.step_ms)],
  ["tokens", "Tokens/s", ({ rates }) => figure(rates.generated_tokens_per_s)],
  ["drafts", "Drafts", ({ rates }) => percent(rates.draft_acceptance_share)],
  ["plan", "Bytes/plan", ({ plan_bytes }) => count(plan_bytes)],
  ["trip", "Round trip", ({ round_trip_ms }) => milliseconds(round_trip_ms)],
];

export class Workers {
  #byElement = new WeakMap();
  #rows = element("tbody");
  #table = element("table", { class: "workers-table" }, head(), this.#rows);
  #scope = element("p", { class: "worker-scope", role: "status" });
  #all = button("Show all workers", () => this.onChoose(null), { class: "link" });
  #only = element("span");

  /**
   * @param {import("./controls.js").Controls} controls
   * @param {(index: number|null) => void} onChoose a worker is to be looked at alone, or all are
   */
  constructor(controls, onChoose) {
    this.controls = controls;
    this.onChoose = onChoose;
    this.#scope.append(this.#only, " ", this.#all);
    const scroller = element("div", { class: "workers-scroll" }, this.#table);
    const { element: section, note } = panel("workers", "Workers", scroller, this.#scope);
    this.element = section;
    this.note = note;
    this.#rows.addEventListener("keydown", (event) => this.#key(event));
  }

  /** @param {number|null} chosen the worker that is looked at alone */
  show(picture, chosen) {
    const workers = severalOf(picture);
    this.element.hidden = workers.length === 0;
    if (!workers.length) return;
    const moved = picture.requests.filter(({ moves }) => moves).length;
    const [, text] = summaryOf(workers);
    write(this.note, text + (moved ? `, ${plural(moved, "request")} moved` : ""));
    const draft = workers.some(({ rates }) => rates.draft_acceptance_share !== null);
    setAttribute(this.#table, "data-drafts", draft);
    setAttribute(this.#table, "data-hosts", workers.some(({ host }) => host));
    write(this.#only, `Only worker ${chosen} is shown below.`);
    this.#scope.hidden = chosen === null;
    const create = ({ index }) => {
      const row = new WorkerRow(index, this.controls, this.onChoose);
      this.#byElement.set(row.element, row);
      return row.element;
    };
    list(
      this.#rows,
      workers,
      ({ index }) => index,
      create,
      (child, worker) => this.#byElement.get(child).show(worker, picture.now, chosen),
    );
  }

  #key(event) {
    const step = STEPS[event.key];
    if (!step || !event.target.matches(".worker-name")) return;
    event.preventDefault();
    const names = [...this.#rows.querySelectorAll(".worker-name")];
    names[names.indexOf(event.target) + step]?.focus();
  }
}

class WorkerRow {
  #worker = null;
  #isChosen = false;
  #name;
  #state = element("span", { class: "pill" });
  #note = element("span", { class: "worker-note" });
  #why = element("span", { class: "worker-why" });
  #share = element("span", { class: "worker-share" });
  #held = svg("rect", { class: "run-held", height: 8, x: 0 });
  #cached = svg("rect", { class: "run-cached", height: 8 });
  #figures = FIGURES.map(([name]) => element("td", { class: `worker-${name}` }));
  #process = element("td", { class: "worker-process" });
  #remove;

  constructor(index, controls, onChoose) {
    this.controls = controls;
    const choose = () => onChoose(this.#isChosen ? null : index);
    const title = "Show this worker alone";
    this.#name = button(`Worker ${index}`, choose, { class: "worker-name", title });
    this.#remove = button("Remove", () => controls.askToRemove(this.#worker), {
      "aria-label": `Remove worker ${index}`,
    });
    const drawn = { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" };
    const bar = svg("svg", { class: "worker-bar", ...drawn }, this.#held, this.#cached);
    const [running, waiting, ...rest] = this.#figures;
    this.element = element(
      "tr",
      { "data-index": index },
      element("th", { scope: "row" }, this.#name),
      element("td", { class: "worker-state" }, this.#state, this.#note, this.#why),
      running,
      waiting,
      element("td", { class: "worker-pages" }, this.#share, bar),
      ...rest,
      this.#process,
      element("td", { class: "worker-action" }, this.#remove),
    );
  }

  show(worker, now, chosen) {
    this.#worker = worker;
    this.#isChosen = worker.index === chosen;
    setAttribute(this.element, "data-trouble", isInTrouble(worker));
    setAttribute(this.element, "data-chosen", this.#isChosen);
    setAttribute(this.#name, "aria-pressed", String(this.#isChosen));
    setAttribute(this.#state, "data-tone", TONES[worker.state] ?? "bad");
    setAttribute(this.#state, "data-worker", worker.state);
    write(this.#state, WORDS[worker.state] ?? worker.state);
    const note = noteOf(worker, now);
    write(this.#note, note);
    write(this.#why, note && worker.last_loss ? ` ${worker.last_loss}` : "");
    FIGURES.forEach(([, , of], i) => write(this.#figures[i], of(worker)));
    this.#showPages(worker.pages);
    const { pid, rank_pids, host, device } = worker;
    const pids = pid === null ? "" : [pid, ...rank_pids].join(", ");
    const process = [pids, host, device].filter(Boolean).join(" · ");
    write(this.#process, process);
    setAttribute(this.#process, "title", process);
    this.#remove.hidden = !this.controls.areAllowed;
    this.#remove.disabled = worker.state === "draining" || worker.state === "starting";
  }

  #showPages({ total, held, cached }) {
    write(this.#share, percent(total ? held / total : null));
    const part = (pages) => (total ? (100 * pages) / total : 0).toFixed(1);
    setAttribute(this.#held, "width", part(held));
    setAttribute(this.#cached, "x", part(held));
    setAttribute(this.#cached, "width", part(cached));
  }
}

/** Since when it is lost, or that it was before; a worker that is well has nothing to say. */
function noteOf({ state, since, restarts }, now) {
  const past = age(now - since);
  if (state === "restarting" || state === "ended") return `${past} ago`;
  if (state === "stalled") return "a step doesn't end";
  if (state !== "running") return "";
  return restarts ? `${plural(restarts, "restart")}, the last ${past} ago` : "";
}

function milliseconds(number) {
  return number === null ? NONE : duration(number / 1000);
}

function head() {
  const [running, waiting, ...rest] = FIGURES.map(([name, title]) =>
    element("th", { scope: "col", class: `worker-${name}` }, title),
  );
  const column = (title, name) => element("th", { scope: "col", class: name }, title);
  return element(
    "thead",
    {},
    element(
      "tr",
      {},
      column("Worker", "worker-head"),
      column("State", "worker-state"),
      running,
      waiting,
      column("Pages", "worker-pages"),
      ...rest,
      column("Process", "worker-process"),
      element("td", { class: "worker-action" }),
    ),
  );
}
