/** Figures with their history: tokens a second, latencies, how idle the device is. */

import { element, list, svg, write } from "../dom.js";
import { duration, durationParts, figure, percent } from "../format.js";
import { History, niceCeiling } from "./history.js";
import { scopeTo, severalOf } from "./scope.js";

const SPAN = 180; // seconds of history
const GAP = 3; // seconds without a picture that break a line
const WIDTH = 180;
const HEIGHT = 36;

const rate = (unit) => (value) => [figure(value), unit];
const drafts = ({ draft_acceptance_share: accepted }) =>
  accepted === null ? "" : `, ${percent(accepted)} of drafts`;
const share = (value) => [percent(value).replace("\u202f%", ""), value === null ? "" : "%"];

/**
 * What is shown. `of` finds the value in a picture, null where there is none; `parts` writes it as
 * [number, unit]; `aside` is a second line; `most` is the upper edge, where it is always the same.
 */
const FIGURES = [
  {
    label: "Generated",
    of: ({ rates }) => rates.generated_tokens_per_s,
    parts: rate("tokens/s"),
    aside: ({ rates }) => `${figure(rates.batch_rows)} rows a step${drafts(rates)}`,
  },
  {
    label: "Prompts",
    of: ({ rates }) => rates.prompt_tokens_per_s,
    parts: rate("tokens/s"),
    aside: ({ rates }) => `${percent(rates.cache_hit_share)} from the cache`,
  },
  latency("ttft", "First token", "Time to the first token, the median of the last minute"),
  latency("itl", "Between tokens", "Inter-token latency, the median of the last minute"),
  {
    label: "Device idle",
    title: "Of the time in which there was something to compute",
    of: ({ rates }) => rates.gpu_idle_share,
    parts: share,
    aside: ({ rates }) => `${figure(rates.steps_per_s)} steps/s`,
    most: 1,
  },
  {
    label: "Step",
    of: ({ rates }) => (rates.step_ms === null ? null : rates.step_ms / 1000),
    parts: durationParts,
    aside: ({ rates, scope, worker }) =>
      scope === null
        ? `${figure(rates.requests_per_s)} requests/s`
        : `${duration(worker.decode_ms / 1000)} with one more`,
  },
];

export class Figures {
  #tiles = FIGURES.map((one) => new Tile(one));
  /** By the worker's number, and null for all: figures and restarts of the last minutes. */
  #pasts = new Map();

  constructor() {
    this.element = element(
      "dl",
      { class: "figures", "aria-label": "Figures" },
      ...this.#tiles.map((tile) => tile.element),
    );
  }

  /** Keep the figures of a picture, those of each worker, too. */
  add(picture) {
    const indexes = severalOf(picture).map(({ index }) => index);
    const pasts = [null, ...indexes].map((index) => [index, this.#pasts.get(index) ?? new Past()]);
    this.#pasts = new Map(pasts);
    for (const [index, past] of this.#pasts) past.add(scopeTo(picture, index));
  }

  /** Show a picture that was added, or one worker's part of it. */
  show(scoped) {
    const past = this.#pasts.get(scoped.scope);
    this.#tiles.forEach((tile, i) => tile.show(scoped, past.histories[i], past.restarts));
  }
}

/** The figures of the last minutes, and when there were restarts. */
class Past {
  histories = FIGURES.map(() => new History(SPAN));
  restarts = [];
  #number = null;

  add(scoped) {
    const { now, worker } = scoped;
    if (this.#number !== null && worker.restarts > this.#number) this.restarts.push(now);
    this.#number = worker.restarts;
    this.restarts = this.restarts.filter((at) => at > now - SPAN);
    FIGURES.forEach(({ of }, i) => this.histories[i].add(now, of(scoped)));
  }
}

class Tile {
  #number = element("span", { class: "figure-number" });
  #unit = element("span", { class: "figure-unit" });
  #aside = element("dd", { class: "figure-aside" });
  #peak = element("span", { class: "figure-peak" });
  #line = svg("path", { class: "spark-line" });
  #restarts = svg("g", { class: "spark-restarts" });

  constructor(figure) {
    this.figure = figure;
    const drawing = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      this.#restarts,
      this.#line,
    );
    this.element = element(
      "div",
      { class: "figure", title: figure.title },
      element("dt", {}, figure.label),
      element("dd", { class: "figure-value" }, this.#number, " ", this.#unit),
      this.#aside,
      element("dd", { class: "spark", "aria-hidden": "true" }, drawing, this.#peak),
    );
  }

  show(picture, history, restarts) {
    const { of, parts, aside, most } = this.figure;
    const value = of(picture);
    const [number, unit] = parts(value);
    write(this.#number, number);
    write(this.#unit, unit);
    write(this.#aside, aside(picture));
    const ceiling = most ?? niceCeiling(history.peak);
    this.#line.setAttribute("d", history.path(WIDTH, HEIGHT, ceiling, GAP));
    write(this.#peak, history.peak ? parts(ceiling).join("\u202f") : "");
    const from = picture.now - history.shown;
    const x = (at) => (WIDTH * (at - from)) / history.shown;
    const inSight = restarts.filter((at) => at > from);
    list(
      this.#restarts,
      inSight,
      String,
      () => svg("line", { y1: 0, y2: HEIGHT }),
      (line, at) => {
        line.setAttribute("x1", x(at));
        line.setAttribute("x2", x(at));
      },
    );
  }
}

function latency(name, label, title) {
  return {
    label,
    title,
    of: ({ latency }) => latency[name]?.p50 ?? null,
    parts: durationParts,
    aside: ({ latency, scope }) =>
      `p99 ${duration(latency[name]?.p99)}${scope === null ? "" : ", all workers"}`,
  };
}
