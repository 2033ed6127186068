/** The media of the message that is being written: chosen, dropped or pasted. */

import { announce } from "../announcer.js";
import { button, element } from "../dom.js";
import { mediaList, readFile } from "./media.js";

const LABELS = { image: "Attach images", audio: "Attach audio" };
const REFUSALS = { image: "an image", audio: "an audio file" };

export class Attachments {
  /** @type {import("./media.js").Medium[]} */
  #media = [];
  #reading = Promise.resolve();
  #list = mediaList([]);
  #choice = element("input", {
    type: "file",
    multiple: true,
    hidden: true,
    on: { change: () => this.#chosen() },
  });
  #attach = button("", () => this.#choice.click());
  /** @type {"image"|"audio"} */
  #kind = "image";

  /** @param {(message: string) => void} say shows why a file can't be attached */
  constructor(say) {
    this.say = say;
    this.element = element(
      "div",
      { class: "attachments", hidden: true },
      this.#list,
      this.#attach,
      this.#choice,
    );
  }

  /** @param {"image"|"audio"|null} kind what the model reads, if anything */
  offer(kind) {
    this.element.hidden = !kind;
    if (!kind) return;
    this.#kind = kind;
    this.#choice.accept = `${kind}/*`;
    this.#attach.textContent = LABELS[kind];
  }

  /** Let files be dropped on `place` and pasted there. */
  accept(place) {
    const leave = () => place.removeAttribute("data-drop");
    place.addEventListener("dragover", (event) => {
      if (!this.#takes(event.dataTransfer)) return;
      event.preventDefault();
      place.setAttribute("data-drop", "");
    });
    place.addEventListener("dragleave", leave);
    place.addEventListener("drop", (event) => {
      leave();
      if (this.#takes(event.dataTransfer)) this.#take(event, event.dataTransfer.files);
    });
    place.addEventListener("paste", (event) => {
      const pasted = event.clipboardData;
      if (this.#takes(pasted) && !isText(pasted.types)) this.#take(event, pasted.files);
    });
  }

  /** @returns {Promise<void>} resolves when no file is being read any more */
  settled() {
    return this.#reading;
  }

  get media() {
    return this.#media;
  }

  /** @param {import("./media.js").Medium[]} media shown in place of those so far */
  show(media) {
    this.#media = media;
    const list = mediaList(media, (index) => this.#remove(index));
    this.#list.replaceWith(list);
    this.#list = list;
  }

  #takes({ types }) {
    return !this.element.hidden && types.includes("Files");
  }

  #take(event, files) {
    event.preventDefault();
    this.#add([...files]);
  }

  #chosen() {
    this.#add([...this.#choice.files]);
    this.#choice.value = ""; // So that the same file can be chosen again.
  }

  /** Add files in their order, after those that are still being read. */
  #add(files) {
    this.#reading = files.reduce(
      (before, file) => before.then(() => this.#addFile(file)),
      this.#reading,
    );
  }

  async #addFile(file) {
    if (!file.type.startsWith(`${this.#kind}/`)) {
      this.say(`${file.name} isn't ${REFUSALS[this.#kind]}.`);
      return;
    }
    try {
      this.show([...this.#media, await readFile(file)]);
      announce(`${file.name} is attached.`);
    } catch {
      this.say(`${file.name} can't be read.`);
    }
  }

  /** Leave a medium out; the focus goes to the next one's button. */
  #remove(index) {
    this.show(this.#media.toSpliced(index, 1));
    const buttons = this.#list.querySelectorAll("button");
    (buttons[Math.min(index, buttons.length - 1)] ?? this.#attach).focus();
  }
}

/** Office programs put a picture of a text beside the text. */
function isText(types) {
  return types.includes("text/plain") && types.includes("text/html");
}
