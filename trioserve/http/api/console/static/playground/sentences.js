/** What a screen reader is told of a text that grows: whole sentences. Nothing touches the page. */

/**
 * Cut a text behind its last whole sentence.
 *
 * @param {string} text what hasn't been told yet
 * @returns {[string, string]} what can be told now, and the rest
 */
export function cutSentences(text) {
  const end = /^.*(?:[.!?…:;]["')\]]?\s|\n)/s.exec(text)?.[0].length ?? 0;
  return [text.slice(0, end).trim(), text.slice(end)];
}
