/** A tree as the rows that show it. Nothing here touches the page. */

/**
 * @typedef {object} Row
 * @property {string} key the names on the way to it: the same one from picture to picture
 * @property {object} task
 * @property {number} level from 1 up, as ARIA counts
 * @property {number} position among its siblings, from 1 up
 * @property {number} size how many siblings there are, itself included
 * @property {boolean} isOpen
 * @property {boolean} isBranch whether it has children
 */

/**
 * The rows in sight, from top to bottom.
 *
 * @param {{name: string, children: object[]}} tree
 * @param {(key: string) => boolean} isOpen
 * @returns {Row[]}
 */
export function rowsOf(tree, isOpen) {
  const rows = [];
  add([tree], "", 1);
  return rows;

  function add(tasks, path, level) {
    const seen = new Map();
    tasks.forEach((task, i) => {
      const number = (seen.get(task.name) ?? 0) + 1;
      seen.set(task.name, number);
      const key = `${path}/${task.name}${number > 1 ? `#${number}` : ""}`;
      const isBranch = task.children.length > 0;
      const row = { key, task, level, position: i + 1, size: tasks.length, isBranch };
      rows.push({ ...row, isOpen: isBranch && isOpen(key) });
      if (isBranch && isOpen(key)) add(task.children, key, level + 1);
    });
  }
}
