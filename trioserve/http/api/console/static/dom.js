/**
 * Making elements, and keeping lists of them.
 *
 * Text gets into the page as text nodes only: there is no innerHTML anywhere, so what a model
 * writes can't become markup.
 */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element.
 *
 * @param {string} name
 * @param {object} properties attributes, by name; true for an empty one, false or null for none;
 *   `on` has listeners, by the events' names
 * @param {...(Node|string|null)} children strings become text nodes, null is left out
 */
export function element(name, properties = {}, ...children) {
  return furnish(document.createElement(name), properties, children);
}

/** The same, of SVG's elements. */
export function svg(name, properties = {}, ...children) {
  return furnish(document.createElementNS(SVG, name), properties, children);
}

/** A button that does `action`. */
export function button(label, action, properties = {}) {
  return element("button", { type: "button", on: { click: action }, ...properties }, label);
}

function furnish(node, { on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(node, name, value);
  for (const [name, listener] of Object.entries(on)) node.addEventListener(name, listener);
  node.append(...children.filter((child) => child !== null));
  return node;
}

/** Set an attribute, or take it away: true is an empty one, false and null are none. */
export function setAttribute(node, name, value) {
  if (value === false || value === null || value === undefined) node.removeAttribute(name);
  else {
    const text = value === true ? "" : String(value);
    if (node.getAttribute(name) !== text) node.setAttribute(name, text);
  }
}

/** Write `text` into `node`, unless it stands there already: a selection in it stays. */
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const listed = new WeakMap();

/**
 * Let `parent` hold one child for each item, in the items' order.
 *
 * An item that was there before keeps its element, with its focus, selection and transitions; one
 * that moves gets the focus back, which browsers take from it.
 *
 * @template T
 * @param {Element} parent holds nothing else
 * @param {T[]} items
 * @param {(item: T) => string|number} keyOf
 * @param {(item: T) => Element} create
 * @param {(child: Element, item: T) => void} update called for new elements, too
 */
export function list(parent, items, keyOf, create, update) {
  const before = listed.get(parent) ?? new Map();
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const now = new Map(items.map((item) => [keyOf(item), item]));
  for (const [key, child] of before) if (!now.has(key)) child.remove();
  const children = new Map();
  let next = parent.firstElementChild;
  for (const [key, item] of now) {
    const child = before.get(key) ?? create(item);
    children.set(key, child);
    update(child, item);
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
  }
  listed.set(parent, children);
  if (focused?.isConnected && focused !== document.activeElement) {
    focused.focus({ preventScroll: true });
  }
}
