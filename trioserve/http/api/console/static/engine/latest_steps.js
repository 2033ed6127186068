/** The latest steps of each worker. Nothing here touches the page. */

export class LatestSteps {
  #byWorker = new Map();

  /** @param {number} most steps that are kept of each worker */
  constructor(most) {
    this.most = most;
  }

  /** Keep the new ones of `steps`, and forget workers that aren't in the picture any more. */
  add({ steps, workers = [] }) {
    const present = new Set(workers.map(({ index }) => index));
    for (const worker of this.#byWorker.keys()) {
      if (!present.has(worker)) this.#byWorker.delete(worker);
    }
    for (const step of steps) {
      let kept = this.#byWorker.get(step.worker) ?? [];
      const last = kept.at(-1) ?? { number: -1, at: -1 };
      // A picture may be shown again.
      if (step.number <= last.number && step.at <= last.at) continue;
      // Numbers begin anew with a new engine.
      if (step.number <= last.number) kept = [];
      this.#byWorker.set(step.worker, [...kept, step].slice(-this.most));
    }
  }

  /** The newest of one worker, or of all if `worker` is null, by their times. */
  of(worker) {
    if (worker !== null) return this.#byWorker.get(worker) ?? [];
    const all = [...this.#byWorker.values()].flat();
    return all.sort((a, b) => a.at - b.at).slice(-this.most);
  }
}

export function keyOf({ worker, number }) {
  return `${worker}:${number}`;
}
