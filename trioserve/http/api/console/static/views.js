/** Which parts of the page are shown: the address's fragment says it, so it can be kept and sent. */

import { element, setAttribute } from "./dom.js";

const VIEWS = { playground: "Playground", engine: "Engine", both: "Both" };

/** Tells "change" when another part is shown. */
export const views = new EventTarget();

/** @returns {"playground"|"engine"|"both"} */
export function currentView() {
  const name = location.hash.slice(1);
  return name in VIEWS ? name : "playground";
}

export function show(name) {
  location.hash = name;
  // The address tells of it later, and whoever shows a part may want the focus there now.
  apply();
}

export function viewLinks() {
  const links = Object.entries(VIEWS).map(([name, label]) => {
    const link = element("a", { href: `#${name}`, class: `view-link view-link-${name}` }, label);
    views.addEventListener("change", () => mark(link, name));
    return link;
  });
  addEventListener("hashchange", apply);
  return links;
}

/** Show what the address says. */
export function apply() {
  document.body.dataset.view = currentView();
  views.dispatchEvent(new Event("change"));
}

function mark(link, name) {
  setAttribute(link, "aria-current", name === currentView() ? "page" : null);
}
