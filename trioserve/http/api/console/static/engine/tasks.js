/** The nurseries and their tasks, as a tree that opens and closes (ARIA's tree pattern). */

import { element, list, setAttribute, write } from "../dom.js";
import { count, plural } from "../format.js";
import { panel } from "./panel.js";
import { rowsOf } from "./rows.js";

export class Tasks {
  #closed = new Set();
  #tree = null;
  #rows = [];
  #focused = "";
  #list = element("ul", { class: "tree", role: "tree", "aria-label": "Tasks" });

  constructor() {
    const { element: section, note } = panel("tasks", "Tasks", this.#list);
    this.element = section;
    this.note = note;
    this.#list.addEventListener("keydown", (event) => this.#key(event));
    this.#list.addEventListener("click", ({ target }) => this.#click(target.closest("li")));
  }

  show({ tasks }) {
    this.#tree = tasks;
    this.#rows = rowsOf(tasks, (key) => !this.#closed.has(key));
    if (!this.#rows.some(({ key }) => key === this.#focused)) this.#focused = this.#rows[0].key;
    write(this.note, plural(numberOf(tasks), "task"));
    list(
      this.#list,
      this.#rows,
      ({ key }) => key,
      newRow,
      (item, row) => this.#update(item, row),
    );
  }

  #update(item, { key, task, level, position, size, isBranch, isOpen }) {
    item.dataset.key = key;
    setAttribute(item, "aria-level", level);
    setAttribute(item, "aria-posinset", position);
    setAttribute(item, "aria-setsize", size);
    setAttribute(item, "aria-expanded", isBranch ? String(isOpen) : null);
    setAttribute(item, "tabindex", key === this.#focused ? 0 : -1);
    item.style.setProperty("--level", level - 1);
    const [name, number, state] = item.children;
    write(name, nameOf(task.name));
    setAttribute(name, "title", task.name);
    write(number, task.count > 1 ? `× ${count(task.count)}` : "");
    const numHidden = task.num_left_out ?? 0;
    write(
      state,
      [task.state, numHidden ? `${count(numHidden)} more below` : ""].filter(Boolean).join(", "),
    );
    setAttribute(state, "data-state", task.state);
  }

  #click(item) {
    if (!item) return;
    this.#focus(item.dataset.key);
    if (item.hasAttribute("aria-expanded")) this.#toggle(item.dataset.key);
  }

  #key(event) {
    const at = this.#rows.findIndex(({ key }) => key === this.#focused);
    const row = this.#rows[at];
    const actions = {
      ArrowDown: () => this.#focus(this.#rows[at + 1]?.key),
      ArrowUp: () => this.#focus(this.#rows[at - 1]?.key),
      Home: () => this.#focus(this.#rows[0].key),
      End: () => this.#focus(this.#rows.at(-1).key),
      ArrowRight: () => (row.isBranch && !row.isOpen ? this.#toggle(row.key) : this.#inward(at)),
      ArrowLeft: () => (row.isOpen ? this.#toggle(row.key) : this.#outward(at)),
      Enter: () => row.isBranch && this.#toggle(row.key),
      " ": () => row.isBranch && this.#toggle(row.key),
    };
    const action = actions[event.key];
    if (!action || !row) return;
    event.preventDefault();
    action();
  }

  #inward(at) {
    const next = this.#rows[at + 1];
    if (next?.level > this.#rows[at].level) this.#focus(next.key);
  }

  #outward(at) {
    const { level } = this.#rows[at];
    this.#focus(this.#rows.slice(0, at).findLast((row) => row.level < level)?.key);
  }

  #toggle(key) {
    if (!this.#closed.delete(key)) this.#closed.add(key);
    this.show({ tasks: this.#tree });
  }

  #focus(key) {
    if (key === undefined) return;
    this.#focused = key;
    for (const item of this.#list.children) item.tabIndex = item.dataset.key === key ? 0 : -1;
    [...this.#list.children].find((item) => item.dataset.key === key).focus();
  }
}

function newRow() {
  return element(
    "li",
    { role: "treeitem" },
    element("span", { class: "task-name" }),
    element("span", { class: "task-count" }),
    element("span", { class: "task-state" }),
  );
}

/** How many tasks there are, those that are alike and those that weren't looked at included. */
function numberOf({ count, children, num_left_out: more = 0 }) {
  return count * (1 + more + children.reduce((sum, child) => sum + numberOf(child), 0));
}

/** A task is named after its function; the modules before that are in the title. */
function nameOf(name) {
  return name.split(".").slice(-2).join(".");
}
