/** The layout of a tree whose nodes have lengths, from left to right. Nothing here touches the page. */

/**
 * @typedef {{id: *, parent: *, pages: number}} TreeNode
 * @typedef {{node: TreeNode, x: number, y: number, width: number, height: number}} Box
 */

/**
 * Where each node is drawn: behind its parent, as wide as it has pages, as high as its leaves.
 *
 * A leaf is one row high. Children are beneath one another, in the order in which they are given.
 * A node whose parent isn't given begins at the left edge.
 *
 * @param {TreeNode[]} nodes
 * @returns {{boxes: Box[], width: number, height: number}} in pages and rows
 */
export function icicle(nodes) {
  const known = new Set(nodes.map(({ id }) => id));
  const children = new Map();
  for (const node of nodes) {
    const parent = known.has(node.parent) ? node.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), node]);
  }
  const boxes = [];

  // Depth first, without recursion: a long conversation is a deep tree.
  let rows = 0;
  const stack = childrenFrom(null, 0);
  while (stack.length) {
    const step = stack.pop();
    if (step.box) {
      step.box.height = rows - step.box.y;
      continue;
    }
    const { node, x } = step;
    const box = { node, x, y: rows, width: node.pages, height: 1 };
    boxes.push(box);
    const next = childrenFrom(node.id, x + node.pages);
    if (next.length) stack.push({ box }, ...next);
    else rows += 1;
  }
  return { boxes, width: Math.max(0, ...boxes.map((box) => box.x + box.width)), height: rows };

  /** Steps for the children of `id`, the first one on top of the stack. */
  function childrenFrom(id, x) {
    return (children.get(id) ?? []).map((node) => ({ node, x })).reverse();
  }
}
