/** Media of messages, images and audio: reading their files, and showing them. */

import { button, element } from "../dom.js";

/**
 * @typedef {object} Medium
 * @property {string} name its file's
 * @property {string} url its file's content, as a data URL
 */

/**
 * Read a medium's file.
 *
 * @param {File} file
 * @returns {Promise<Medium>}
 * @throws {DOMException} it can't be read
 */
export function readFile(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: reader.result });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/**
 * A list that shows media.
 *
 * @param {Medium[]} media
 * @param {((index: number) => void)|null} onRemove makes a button for each that calls it
 */
export function mediaList(media, onRemove = null) {
  const items = media.map(({ name, url }, index) => {
    const remove = onRemove && button("×", () => onRemove(index), { "aria-label": `Remove ${name}` });
    return element("li", {}, shown(name, url), remove);
  });
  return element("ul", { class: "media", "aria-label": "Media" }, ...items);
}

/** Whether a data URL is that of audio. */
export function isAudio(url) {
  return url.startsWith("data:audio/");
}

function shown(name, url) {
  if (isAudio(url)) {
    return element("audio", { src: url, controls: true, title: name, "aria-label": name });
  }
  return element("img", { src: url, alt: name, title: name });
}
