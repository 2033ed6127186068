/** Putting text on the clipboard, on a page without TLS, too. */

import { button, element } from "./dom.js";

const SAID_FOR = 1500; // milliseconds for which a button says that it was done

/** A button that copies a text, and says so. */
export function copyButton(label, textOf) {
  const copy = button(label, async () => {
    await copyText(textOf());
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = label), SAID_FOR);
  });
  return copy;
}

async function copyText(text) {
  // Browsers give the clipboard's interface to localhost and to pages over TLS only.
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { class: "unseen", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
