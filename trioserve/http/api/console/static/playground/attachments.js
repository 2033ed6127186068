/** The images of the message that is being written: chosen, dropped or pasted. */

import { announce } from "../announcer.js";
import { button, element } from "../dom.js";
import { imageList, readImage } from "./images.js";

export class Attachments {
  /** @type {import("./images.js").Image[]} */
  #images = [];
  #reading = Promise.resolve();
  #list = imageList([]);
  #choice = element("input", {
    type: "file",
    accept: "image/*",
    multiple: true,
    hidden: true,
    on: { change: () => this.#chosen() },
  });
  #attach = button("Attach images", () => this.#choice.click());

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

  /** Offer them, if the model reads images. */
  offer(areRead) {
    this.element.hidden = !areRead;
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

  get images() {
    return this.#images;
  }

  /** @param {import("./images.js").Image[]} images shown in place of those so far */
  show(images) {
    this.#images = images;
    const list = imageList(images, (index) => this.#remove(index));
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
    if (!file.type.startsWith("image/")) {
      this.say(`${file.name} isn't an image.`);
      return;
    }
    try {
      this.show([...this.#images, await readImage(file)]);
      announce(`${file.name} is attached.`);
    } catch {
      this.say(`${file.name} can't be read.`);
    }
  }

  /** Leave an image out; the focus goes to the next one's button. */
  #remove(index) {
    this.show(this.#images.toSpliced(index, 1));
    const buttons = this.#list.querySelectorAll("button");
    (buttons[Math.min(index, buttons.length - 1)] ?? this.#attach).focus();
  }
}

/** Office programs put a picture of a text beside the text. */
function isText(types) {
  return types.includes("text/plain") && types.includes("text/html");
}
