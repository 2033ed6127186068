/** The console: its parts, and what joins them. */

import { access } from "./access.js";
import { AccessDialog } from "./access_dialog.js";
import { button, write } from "./dom.js";
import { Engine } from "./engine/engine.js";
import { Playground } from "./playground/playground.js";
import { helpDialog, listen } from "./shortcuts.js";
import { applyTheme, themeButton, toggleTheme } from "./theme.js";
import { apply, show, viewLinks, views } from "./views.js";

applyTheme();

const accessDialog = new AccessDialog();
const help = helpDialog();
const askForKey = (why) => accessDialog.open(why);

const playground = new Playground(document.getElementById("playground"), {
  askForKey,
  onModel: (name) => write(document.getElementById("model"), name),
});
const engine = new Engine(document.getElementById("engine"), { askForKey });

document.body.append(accessDialog.element, help);
document.getElementById("views").append(...viewLinks());
document.getElementById("actions").append(
  button("API keys", () => accessDialog.open(), { class: "quiet", title: "Enter API keys (k)" }),
  themeButton(),
  button("?", () => help.showModal(), { class: "quiet", "aria-label": "Keyboard shortcuts" }),
);

access.addEventListener("change", () => {
  playground.loadModels();
  engine.reconnect();
});
views.addEventListener("change", () => engine.lookOrLeave());
document.addEventListener("visibilitychange", () => engine.lookOrLeave());

listen({
  help: () => help.showModal(),
  playground: () => show("playground"),
  engine: () => show("engine"),
  both: () => show("both"),
  write: () => (show("playground"), playground.focus()),
  mode: () => playground.otherMode(),
  new: () => playground.clear(),
  keys: () => accessDialog.open(),
  theme: toggleTheme,
  stop: () => playground.stop(),
});

apply();
playground.loadModels();
