/**
 * A picture as one worker alone would give it, and what there is to say of several. Nothing here
 * touches the page.
 */

/** States in which a worker should compute, and doesn't. */
const TROUBLE = new Set(["restarting", "stalled", "ended"]);
const NOTICED = 60; // seconds for which a worker's return is pointed out

export function isInTrouble({ state }) {
  return TROUBLE.has(state);
}

/** The workers, if there are several; a single one is the whole. */
export function severalOf({ workers = [] }) {
  return workers.length > 1 ? workers : [];
}

/**
 * The part of a picture that is one worker's.
 *
 * Latencies and the tree of tasks stay those of the server: they aren't known of a worker. Steps
 * stay all of them, because those of the others are wanted later.
 *
 * @param {object} picture
 * @param {number|null} index the worker's number; null, or one that isn't there, for all of it
 */
export function scopeTo(picture, index) {
  const worker = severalOf(picture).find((each) => each.index === index);
  if (!worker) return { ...picture, scope: null };
  const isHere = (each) => each.worker === index;
  const { prefix } = picture;
  return {
    ...picture,
    scope: index,
    worker,
    pages: worker.pages,
    rates: { ...worker.rates, requests_per_s: null },
    requests: picture.requests.filter(isHere),
    num_requests_left_out: 0,
    prefix: {
      nodes: prefix.nodes.filter(isHere),
      num_left_out: prefix.left_out_by_worker?.[index] ?? 0,
    },
  };
}

/** How many workers run, as [tone, text]; the tone is "good", "warn" or "bad". */
export function summaryOf(workers) {
  const running = workers.filter(({ state }) => state === "running").length;
  const text = `${running} of ${workers.length} workers run`;
  if (workers.some(isInTrouble)) return ["bad", text];
  return [running < workers.length ? "warn" : "good", text];
}

/**
 * What has to be said of a worker now: that it is lost, hangs, was given up, or was replaced a
 * moment ago; null if there is nothing.
 */
export function noticeOf({ index, state, restarts, since, last_loss }, now) {
  const why = last_loss ? ` (${last_loss})` : "";
  const seconds = now - since;
  const ago = seconds < 5 ? "just now" : `${5 * Math.floor(seconds / 5)} s ago`;
  if (state === "restarting") {
    return `Worker ${index} was lost${why}. The others have its requests; the next process loads.`;
  }
  if (state === "stalled") return `Worker ${index} hangs: a step doesn't end.`;
  if (state === "ended") return `Worker ${index} was given up${why}. The others go on without it.`;
  if (state !== "running" || !restarts || seconds >= NOTICED) return null;
  return `Worker ${index} was lost${why} and replaced ${ago}. Requests went on.`;
}
