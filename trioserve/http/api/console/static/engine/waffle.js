/** Dividing a number of cells as the parts of a whole are. Nothing here touches the page. */

/**
 * Cells for each part, in proportion; a part that is there at all has a cell.
 *
 * @param {number[]} parts
 * @param {number} cells
 * @returns {number[]} as many as `parts`, together `cells`
 */
export function shareCells(parts, cells) {
  const total = parts.reduce((sum, part) => sum + part, 0);
  if (total <= 0) return parts.map(() => 0);
  const exact = parts.map((part) => (part * cells) / total);
  const shares = exact.map((share) => (share > 0 ? Math.max(Math.floor(share), 1) : 0));
  let left = cells - shares.reduce((sum, share) => sum + share, 0);
  // What rounding left goes to those that lost most by it; what it took comes from the largest.
  const byLoss = exact
    .map((share, i) => i)
    .sort((a, b) => exact[b] - shares[b] - (exact[a] - shares[a]));
  for (let i = 0; left > 0; i = (i + 1) % parts.length) {
    if (parts[byLoss[i]] > 0) (shares[byLoss[i]]++, left--);
  }
  while (left < 0) (shares[shares.indexOf(Math.max(...shares))]--, left++);
  return shares;
}
