/** The form beside the playground: model, system prompt, sampling parameters. */

import { element, setAttribute, write } from "../dom.js";
import { FIELDS, valuesOf } from "./fields.js";

const MOST_ALTERNATIVES = 20; // the server's --max-logprobs, unless that was changed

export class Settings {
  #model = element("select", { id: "model-choice", name: "model" });
  #system = element("textarea", {
    name: "system",
    rows: 3,
    placeholder: "None",
    "aria-describedby": "system-hint",
  });
  #alternatives = element("input", {
    type: "number",
    name: "alternatives",
    min: 0,
    max: MOST_ALTERNATIVES,
    step: 1,
    value: 5,
  });
  #underlines = element("input", { type: "checkbox", name: "underlines" });
  #controls = new Map(FIELDS.map((field) => [field.name, new Control(field)]));

  constructor() {
    this.element = element(
      "form",
      { class: "settings", id: "settings", "aria-label": "Settings", on: { submit: prevent } },
      labelled("Model", this.#model, ""),
      element(
        "div",
        { class: "settings-system" },
        labelled("System prompt", this.#system, "", "system-hint"),
      ),
      element(
        "fieldset",
        {},
        element("legend", {}, "Sampling"),
        ...[...this.#controls.values()].map((control) => control.element),
      ),
      labelled(
        "Token probabilities",
        this.#alternatives,
        `0 to ${MOST_ALTERNATIVES} alternatives a token, on hover or focus; 0 for none`,
      ),
      element("label", { class: "check" }, this.#underlines, "Underline improbable tokens"),
    );
  }

  /** @param {{id: string, parent: string|null}[]} models as /v1/models lists them */
  setModels(models) {
    const chosen = this.#model.value;
    const options = models.map(({ id, parent }) =>
      element("option", { value: id }, parent ? `${id} (adapter of ${parent})` : id),
    );
    this.#model.replaceChildren(...options);
    if (models.some(({ id }) => id === chosen)) this.#model.value = chosen;
  }

  /** @returns {import("./requests.js").Settings} what the form says now */
  values() {
    const controls = [...this.#controls];
    return {
      model: this.#model.value,
      system: this.#system.value.trim(),
      alternatives: Number(this.#alternatives.value),
      sampling: valuesOf(Object.fromEntries(controls.map(([name, one]) => [name, one.text]))),
    };
  }

  /** Show at a field, if it is one of the form's, what the server said of it. */
  showError(name, message) {
    this.#controls.get(name)?.showError(message);
  }

  clearErrors() {
    for (const control of this.#controls.values()) control.showError("");
  }
}

/** One parameter: a number with a slider where that is good for something, or lines of text. */
class Control {
  #input;
  #slider = null;
  #error;

  constructor({ name, label, kind, hint, usual = "", min, max, step, slide }) {
    const described = { "aria-describedby": `${name}-hint ${name}-error` };
    this.#error = element("span", { class: "field-error", id: `${name}-error` });
    this.#input =
      kind === "lines"
        ? element("textarea", { name, rows: 2, placeholder: "None", ...described })
        : element("input", {
            type: "number",
            name,
            placeholder: usual,
            min,
            max,
            step,
            ...described,
          });
    if (slide) {
      this.#slider = element("input", {
        type: "range",
        min: slide[0],
        max: slide[1],
        step,
        value: usual,
        "aria-label": `${label}, slider`,
        on: { input: () => (this.#input.value = this.#slider.value) },
      });
      this.#input.addEventListener(
        "input",
        () => (this.#slider.value = this.#input.value || usual),
      );
    }
    this.element = element(
      "div",
      { class: `field field-${kind}` },
      element(
        "label",
        { class: "field-line" },
        element("span", { class: "field-name" }, label),
        this.#input,
      ),
      this.#slider,
      element("span", { class: "hint", id: `${name}-hint` }, hint),
      this.#error,
    );
  }

  /** What was typed. What a number input can't read as one comes as empty, as browsers have it. */
  get text() {
    return this.#input.value;
  }

  showError(message) {
    write(this.#error, message);
    setAttribute(this.#input, "aria-invalid", message ? "true" : null);
  }
}

function labelled(name, input, hint, hintId = null) {
  return element(
    "label",
    { class: "field" },
    element("span", { class: "field-name" }, name),
    input,
    hint || hintId ? element("span", { class: "hint", id: hintId }, hint) : null,
  );
}

function prevent(event) {
  event.preventDefault();
}
