/** The playground: chat and completion over one form of settings; one answer runs at a time. */

import { keys } from "../access.js";
import { addressOf } from "../address.js";
import { button, element, setAttribute } from "../dom.js";
import { call, errorIn, events, ServerError } from "../http.js";
import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { curlCommand } from "./requests.js";
import { Settings } from "./settings.js";

const NEAR_THE_END = 80; // pixels: whoever reads further up isn't pulled down

export class Playground {
  #settings = new Settings();
  #modes;
  #mode = "chat";
  #running = null;

  /**
   * @param {HTMLElement} place where it is shown
   * @param {object} page
   * @param {(why: string) => void} page.askForKey
   * @param {(name: string) => void} page.onModel told what the server's model is called
   */
  constructor(place, { askForKey, onModel }) {
    this.askForKey = askForKey;
    this.onModel = onModel;
    const self = {
      settings: () => this.#settings.values(),
      run: (request, view) => this.#run(request, view),
      curl: ({ path, body }) => curlCommand(addressOf(path), body, Boolean(keys().api)),
    };
    this.#modes = { chat: new Chat(self), completion: new Completion(self) };
    this.#build(place);
    this.setMode("chat");
  }

  /** Ask the server which models it serves; for a key, if it wants one. */
  async loadModels() {
    try {
      const { data } = await call("/v1/models");
      this.#settings.setModels(data);
      this.onModel(data.find(({ parent }) => !parent)?.id ?? "");
    } catch (error) {
      if (error.status === 401) this.askForKey("This server wants an API key.");
      else this.#say(error.message);
    }
  }

  setMode(name) {
    this.#mode = name;
    this.pane.dataset.mode = name;
    for (const radio of this.modeRadios) radio.checked = radio.value === name;
    this.outputs.replaceChildren(this.#modes[name].output);
    this.composerInput.replaceChildren(this.#modes[name].input);
    this.#showState();
  }

  otherMode() {
    this.setMode(this.#mode === "chat" ? "completion" : "chat");
  }

  focus() {
    this.#modes[this.#mode].input.focus();
  }

  clear() {
    this.stop();
    this.#modes[this.#mode].clear();
    this.focus();
  }

  /** End the answer that is coming; its request ends at the server, too. */
  stop() {
    this.#running?.abort();
  }

  #submit() {
    this.#modes[this.#mode].submit();
  }

  /**
   * Stream the answer to `request` into `view`.
   *
   * @param {{path: string, body: object}} request
   * @param {import("./answer_view.js").AnswerView} view
   */
  async #run({ path, body }, view) {
    this.stop();
    const run = new AbortController();
    this.#running = run;
    this.#settings.clearErrors();
    this.#showState();
    try {
      for await (const { data } of events(path, { body, signal: run.signal })) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        const error = errorIn(chunk);
        if (error) throw error;
        this.#keepTheEndInSight(() => view.add(chunk));
      }
      view.end();
    } catch (error) {
      this.#failed(error, view);
    } finally {
      if (this.#running === run) this.#running = null;
      this.#showState();
    }
  }

  #failed(error, view) {
    if (error.name === "AbortError") {
      view.end("stopped");
      return;
    }
    if (!(error instanceof ServerError)) throw error;
    if (error.param) this.#settings.showError(error.param, error.reason);
    this.#keepTheEndInSight(() => view.fail(error, this.askForKey));
  }

  /** Do what makes the text longer, and scroll along if its end was in sight. */
  #keepTheEndInSight(grow) {
    const { scrollHeight, scrollTop, clientHeight } = this.outputs;
    const isNear = scrollHeight - scrollTop - clientHeight < NEAR_THE_END;
    grow();
    if (isNear) this.outputs.scrollTop = this.outputs.scrollHeight;
  }

  #showState() {
    const isRunning = this.#running !== null;
    this.stopButton.hidden = !isRunning;
    this.sendButton.hidden = isRunning;
    this.sendButton.textContent = this.#mode === "chat" ? "Send" : "Complete";
    this.notice.hidden = true;
  }

  #say(message) {
    this.notice.textContent = message;
    this.notice.hidden = false;
  }

  #build(place) {
    this.outputs = element("div", {
      class: "outputs",
      tabindex: 0,
      "aria-label": "Answers",
      role: "region",
    });
    this.composerInput = element("div", { class: "composer-input" });
    this.notice = element("p", { class: "notice", role: "alert", hidden: true });
    this.sendButton = button("Send", () => this.#submit(), { class: "primary", id: "send" });
    this.stopButton = button("Stop", () => this.stop(), {
      class: "stop",
      id: "stop",
      title: "Esc",
    });
    this.modeRadios = ["chat", "completion"].map((name) => this.#modeRadio(name));
    const settingsToggle = button(
      "Settings",
      () => {
        const isOpen = this.pane.toggleAttribute("data-settings");
        setAttribute(settingsToggle, "aria-expanded", String(isOpen));
      },
      { class: "quiet settings-toggle", "aria-expanded": "false", "aria-controls": "settings" },
    );
    this.pane = element(
      "div",
      { class: "playground" },
      element(
        "div",
        { class: "playground-head" },
        element("h2", { class: "unseen" }, "Playground"),
        element(
          "fieldset",
          { class: "segments" },
          element("legend", { class: "unseen" }, "Mode"),
          ...this.modeRadios.map((radio) => element("label", {}, radio, radio.dataset.label)),
        ),
        button("New", () => this.clear(), { class: "quiet", title: "Begin anew (n)" }),
        settingsToggle,
      ),
      this.outputs,
      element(
        "div",
        { class: "composer" },
        this.notice,
        this.composerInput,
        element("div", { class: "composer-actions" }, this.sendButton, this.stopButton),
      ),
      this.#settings.element,
    );
    place.append(this.pane);
  }

  #modeRadio(name) {
    return element("input", {
      type: "radio",
      name: "mode",
      value: name,
      "data-label": name === "chat" ? "Chat" : "Completion",
      on: { change: () => this.setMode(name) },
    });
  }
}
