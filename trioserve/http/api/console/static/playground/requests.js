/** The bodies of the playground's requests, and the same as a command. Nothing here touches the page. */

import { isAudio } from "./media.js";

/**
 * @typedef {object} Settings
 * @property {string} model
 * @property {string} system the system prompt, empty for none
 * @property {number} alternatives how many probable tokens to tell for each place; 0 for none
 * @property {Record<string, *>} sampling the fields that aren't empty
 */

const STREAMED = { stream: true, stream_options: { include_usage: true } };

/**
 * @param {Settings} settings
 * @param {{role: string, text: string, media: import("./media.js").Medium[]}[]} turns
 */
export function chatRequest({ model, system, alternatives, sampling }, turns) {
  const instruction = system ? [{ role: "system", content: system }] : [];
  const probabilities = alternatives ? { logprobs: true, top_logprobs: alternatives } : {};
  return {
    path: "/v1/chat/completions",
    body: {
      model,
      messages: [...instruction, ...turns.map(messageOf)],
      ...sampling,
      ...probabilities,
      ...STREAMED,
    },
    media: turns.flatMap(({ media }) => media),
  };
}

/** A turn's message: its media, if there are any, and then its text. */
function messageOf({ role, text, media }) {
  if (!media.length) return { role, content: text };
  const content = media.map(({ url }) => partOf(url));
  if (text) content.push({ type: "text", text });
  return { role, content };
}

function partOf(url) {
  if (isAudio(url)) return { type: "audio_url", audio_url: { url } };
  return { type: "image_url", image_url: { url } };
}

/**
 * @param {Settings} settings
 * @param {string} prompt
 */
export function completionRequest({ model, alternatives, sampling }, prompt) {
  const probabilities = alternatives ? { logprobs: alternatives } : {};
  return {
    path: "/v1/completions",
    body: { model, prompt, ...sampling, ...probabilities, ...STREAMED },
    media: [],
  };
}

/**
 * A shell's command that makes the request. Keys stay out of it.
 *
 * Media do, too: an argument holds no more than 128 KiB on Linux, and a terminal less. The command
 * reads them from files of their names, in the folder where it is run.
 *
 * @param {string} address where the request goes
 * @param {{body: object, media: import("./media.js").Medium[]}} request
 * @param {boolean} needsKey
 */
export function curlCommand(address, { body, media }, needsKey) {
  const json = JSON.stringify(body, null, 2);
  const lines = [
    `curl -N ${quoted(address)}`,
    needsKey ? `-H "Authorization: Bearer $TRIOSERVE_API_KEY"` : null,
    `-H 'Content-Type: application/json'`,
    media.length ? `-d @- <<END\n${withFiles(json, media)}\nEND` : `-d ${quoted(json)}`,
  ];
  return lines.filter(Boolean).join(" \\\n  ");
}

/** A shell's here-document that stands for `json`, with the media' files in place of their data. */
function withFiles(json, media) {
  const literal = json.replaceAll(/[\\$`]/g, "\\$&");
  return media.reduce((text, { name, url }) => {
    const head = url.slice(0, url.indexOf(",") + 1);
    const file = `$(base64 < ${quoted(name)} | tr -d '\\n')`;
    return text.replaceAll(`"${url}"`, () => `"${head}${file}"`);
  }, literal);
}

/** One word of a POSIX shell. */
function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}
