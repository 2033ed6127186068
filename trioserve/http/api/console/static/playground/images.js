/** Images of messages: reading their files, and showing them. */

import { button, element } from "../dom.js";

/**
 * @typedef {object} Image
 * @property {string} name its file's
 * @property {string} url its file's content, as a data URL
 */

/**
 * Read an image's file.
 *
 * @param {File} file
 * @returns {Promise<Image>}
 * @throws {DOMException} it can't be read
 */
export function readImage(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: reader.result });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/**
 * A list that shows images.
 *
 * @param {Image[]} images
 * @param {((index: number) => void)|null} onRemove makes a button for each that calls it
 */
export function imageList(images, onRemove = null) {
  const items = images.map(({ name, url }, index) => {
    const remove = onRemove && button("×", () => onRemove(index), { "aria-label": `Remove ${name}` });
    return element("li", {}, element("img", { src: url, alt: name, title: name }), remove);
  });
  return element("ul", { class: "images", "aria-label": "Images" }, ...items);
}
