/** Keyboard shortcuts, and the dialog that lists them. */

import { button, element } from "./dom.js";

const STORED = "trioserve.letters-off";

/**
 * What is listed. Those with a `command` are single keys, which work wherever nothing is typed
 * into; the others belong to the parts of the page that they name.
 */
export const SHORTCUTS = [
  { key: "?", does: "Show these shortcuts", command: "help" },
  { key: "p", does: "Playground", command: "playground" },
  { key: "e", does: "Engine", command: "engine" },
  { key: "b", does: "Both, side by side", command: "both" },
  { key: "/", does: "Write a message or a prompt", command: "write" },
  { key: "m", does: "Chat or completion", command: "mode" },
  { key: "n", does: "New chat", command: "new" },
  { key: "k", does: "Enter API keys", command: "keys" },
  { key: "t", does: "Light or dark", command: "theme" },
  { key: "Esc", does: "Stop the answer; close what is open" },
  { key: "Enter", does: "Send the message (Shift + Enter: a new line)" },
  { key: "Ctrl + Enter", does: "Complete the prompt" },
  { key: "← →", does: "In an answer: from token to token. In trees: close and open" },
  { key: "↑ ↓", does: "In trees and lists: from one to the next" },
];

/**
 * Have single keys run commands.
 *
 * @param {Record<string, () => void>} commands by name; `stop` belongs to Esc
 */
export function listen(commands) {
  const bound = new Map(SHORTCUTS.filter((s) => s.command).map((s) => [s.key, s.command]));
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") commands.stop();
    const command = bound.get(event.key);
    if (!command || event.ctrlKey || event.metaKey || event.altKey) return;
    if (isTyping(event.target) || localStorage.getItem(STORED)) return;
    event.preventDefault();
    commands[command]();
  });
}

/** The dialog that lists the keys, and can switch those off that are letters. */
export function helpDialog() {
  const rows = SHORTCUTS.map(({ key, does }) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, element("kbd", {}, key)),
      element("td", {}, does),
    ),
  );
  const letters = element("input", {
    type: "checkbox",
    checked: !localStorage.getItem(STORED),
    on: { change: () => keepLetters(letters.checked) },
  });
  const dialog = element(
    "dialog",
    { class: "dialog", id: "help", "aria-label": "Keyboard shortcuts" },
    element("h2", {}, "Keyboard shortcuts"),
    element("table", { class: "keys" }, element("tbody", {}, ...rows)),
    element("label", { class: "check" }, letters, "Shortcuts of a single key, such as p and e"),
    element(
      "div",
      { class: "row" },
      button("Close", () => dialog.close(), { class: "primary" }),
    ),
  );
  return dialog;
}

function keepLetters(areOn) {
  if (areOn) localStorage.removeItem(STORED);
  else localStorage.setItem(STORED, "off");
}

function isTyping(target) {
  return target.matches("input:not([type=checkbox], [type=radio], [type=range]), textarea, select");
}
