/** What became of a request, in time. Nothing here touches the page. */

/**
 * @typedef {[string, number]} Change a state, and when it was entered, in Unix seconds
 * @typedef {{state: string, from: number, to: number}} Span
 */

const RUNNING = new Set(["prefill", "decode"]);

/**
 * The states that a request was in, one after the other.
 *
 * @param {Change[]} timeline the last one may be "finished", which lasts no time
 * @param {number} now until when a request that hasn't finished is in its last state
 * @returns {Span[]}
 */
export function spansOf(timeline, now) {
  return timeline
    .map(([state, from], i) => ({ state, from, to: Math.max(timeline[i + 1]?.[1] ?? now, from) }))
    .filter(({ state }) => state !== "finished");
}

/**
 * Spans as shares of a window's width, cut off at its edges.
 *
 * @param {Span[]} spans
 * @param {number} from the window's left edge, in Unix seconds
 * @param {number} to its right edge
 * @returns {{state: string, x: number, width: number}[]} those that are in sight
 */
export function barsOf(spans, from, to) {
  const place = (at) => Math.min(Math.max((at - from) / (to - from), 0), 1);
  return spans
    .filter((span) => span.to > from && span.from < to)
    .map((span) => ({
      state: span.state,
      x: place(span.from),
      width: place(span.to) - place(span.from),
    }));
}

/** How much of a request's work is done, from 0 to 1; null where no end is known. */
export function progressOf({ state, prompt_tokens, computed_tokens, output_tokens, max_tokens }) {
  if (state === "finished") return 1;
  if (max_tokens === null || max_tokens === undefined) return null;
  const all = prompt_tokens + max_tokens;
  if (all <= 0) return null;
  return Math.min((Math.min(computed_tokens, prompt_tokens) + output_tokens) / all, 1);
}

/**
 * Requests in the order of their rows: those that run, those that wait, those that have ended; of
 * each kind the newest first, as they are given.
 */
export function inOrder(requests) {
  const rank = ({ state }) => (state === "finished" ? 2 : RUNNING.has(state) ? 0 : 1);
  return [...requests].sort((a, b) => rank(a) - rank(b));
}
