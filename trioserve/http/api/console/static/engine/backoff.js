/** How long to wait before the next attempt. Nothing here touches the page, a clock or chance. */

const FIRST = 0.5;
const LONGEST = 10;

/**
 * @param {number} attempt from 0 up, of those that failed in a row
 * @param {number} chance a random number in [0, 1): not all who were cut off come back at once
 * @returns {number} seconds
 */
export function backoff(attempt, chance) {
  return Math.min(FIRST * 2 ** attempt, LONGEST) * (0.75 + chance / 2);
}
