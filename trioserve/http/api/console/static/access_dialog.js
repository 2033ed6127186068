/** Where keys are entered. */

import { keys, serverHasAdminKey, setKeys } from "./access.js";
import { button, element, write } from "./dom.js";

export class AccessDialog {
  #why = element("p", { class: "notice", role: "status", hidden: true });
  #api = keyField("api-key", "API key", "For chat, completions and the engine's picture.");
  #admin = keyField(
    "admin-key",
    "Admin key",
    "To pause the server, end requests, empty the cache, add and remove workers.",
  );

  constructor() {
    const form = element(
      "form",
      { method: "dialog", on: { submit: () => this.#save() } },
      element("h2", {}, "API keys"),
      this.#why,
      this.#api.label,
      this.#admin.label,
      element(
        "p",
        { class: "hint" },
        "They are kept in this tab until it is closed, and sent to this server only.",
      ),
      element(
        "div",
        { class: "row" },
        element("button", { type: "submit", class: "primary" }, "Use these keys"),
        button("Forget", () => this.#forget()),
        button("Cancel", () => this.element.close(), { class: "quiet" }),
      ),
    );
    this.element = element("dialog", { class: "dialog", id: "access", "aria-label": "API keys" }, form);
  }

  /** @param {string} why what was refused, if anything was */
  open(why = "") {
    const { api, admin } = keys();
    this.#api.input.value = api;
    this.#admin.input.value = admin;
    write(this.#why, why);
    this.#why.hidden = !why;
    if (!this.element.open) this.element.showModal();
    this.#api.input.focus();
    serverHasAdminKey().then((hasOne) => (this.#admin.label.hidden = !hasOne));
  }

  #save() {
    setKeys({ api: this.#api.input.value.trim(), admin: this.#admin.input.value.trim() });
  }

  #forget() {
    setKeys({ api: "", admin: "" });
    this.element.close();
  }
}

function keyField(id, name, hint) {
  const input = element("input", {
    id,
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    "aria-describedby": `${id}-hint`,
  });
  const label = element(
    "label",
    { class: "field" },
    element("span", { class: "field-name" }, name),
    input,
    element("span", { class: "hint", id: `${id}-hint` }, hint),
  );
  return { input, label };
}
