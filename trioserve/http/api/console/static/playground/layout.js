/** Where the playground's parts are on the page, and what of them is shown. */

import { button, element, setAttribute } from "../dom.js";

const NEAR_THE_END = 80; // pixels: whoever reads further up isn't pulled down
const MODES = { chat: ["Chat", "Send"], completion: ["Completion", "Complete"] };

export class Layout {
  #outputs = element("div", {
    class: "outputs",
    tabindex: 0,
    role: "region",
    "aria-label": "Answers",
  });
  #input = element("div", { class: "composer-input" });
  #notice = element("p", { class: "notice", role: "alert", hidden: true });
  #send;
  #stop;
  #radios;

  /**
   * @param {HTMLElement} settings the form of settings
   * @param {object} actions
   * @param {() => void} actions.submit
   * @param {() => void} actions.stop
   * @param {() => void} actions.clear
   * @param {(mode: "chat"|"completion") => void} actions.setMode
   */
  constructor(settings, { submit, stop, clear, setMode }) {
    this.#send = button("", submit, { class: "primary", id: "send" });
    this.#stop = button("Stop", stop, { class: "stop", id: "stop", title: "Esc", hidden: true });
    this.#radios = Object.keys(MODES).map((mode) =>
      element("input", {
        type: "radio",
        name: "mode",
        value: mode,
        on: { change: () => setMode(mode) },
      }),
    );
    this.element = element(
      "div",
      { class: "playground" },
      this.#head(clear),
      this.#outputs,
      element(
        "div",
        { class: "composer" },
        this.#notice,
        this.#input,
        element("div", { class: "composer-actions" }, this.#send, this.#stop),
      ),
      settings,
    );
  }

  /** @param {"chat"|"completion"} mode @param {{composer: Node, output: Node}} parts the mode's own */
  showMode(mode, { composer, output }) {
    this.element.dataset.mode = mode;
    for (const radio of this.#radios) radio.checked = radio.value === mode;
    this.#outputs.replaceChildren(output);
    this.#input.replaceChildren(composer);
    this.#send.textContent = MODES[mode][1];
  }

  /** Show the button that sends or the one that stops, which share a place and the focus. */
  showRunning(isRunning) {
    const hasFocus = [this.#send, this.#stop].includes(document.activeElement);
    this.#stop.hidden = !isRunning;
    this.#send.hidden = isRunning;
    this.#notice.hidden = true;
    if (hasFocus) (isRunning ? this.#stop : this.#send).focus();
  }

  /** Show what went wrong apart from any answer. */
  say(message) {
    this.#notice.textContent = message;
    this.#notice.hidden = false;
  }

  /** Do what makes the text longer, and scroll along if its end was in sight. */
  keepTheEndInSight(grow) {
    const { scrollHeight, scrollTop, clientHeight } = this.#outputs;
    const isNear = scrollHeight - scrollTop - clientHeight < NEAR_THE_END;
    grow();
    if (isNear) this.#outputs.scrollTop = this.#outputs.scrollHeight;
  }

  #head(clear) {
    const toggle = () => {
      const isOpen = this.element.toggleAttribute("data-settings");
      setAttribute(settings, "aria-expanded", String(isOpen));
    };
    const settings = button("Settings", toggle, {
      class: "quiet settings-toggle",
      "aria-expanded": "false",
      "aria-controls": "settings",
    });
    return element(
      "div",
      { class: "playground-head" },
      element("h2", { class: "unseen" }, "Playground"),
      element(
        "fieldset",
        { class: "segments" },
        element("legend", { class: "unseen" }, "Mode"),
        ...this.#radios.map((radio) => element("label", {}, radio, MODES[radio.value][0])),
      ),
      button("New", clear, { class: "quiet", title: "Begin anew (n)" }),
      settings,
    );
  }
}
