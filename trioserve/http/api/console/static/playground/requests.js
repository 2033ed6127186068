/** The bodies of the playground's requests, and the same as a command. Nothing here touches the page. */

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
 * @param {{role: string, text: string, images: import("./images.js").Image[]}[]} turns
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
    images: turns.flatMap(({ images }) => images),
  };
}

/** A turn's message: its images, if there are any, and then its text. */
function messageOf({ role, text, images }) {
  if (!images.length) return { role, content: text };
  const content = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  if (text) content.push({ type: "text", text });
  return { role, content };
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
    images: [],
  };
}

/**
 * A shell's command that makes the request. Keys stay out of it.
 *
 * Images do, too: an argument holds no more than 128 KiB on Linux, and a terminal less. The command
 * reads them from files of their names, in the folder where it is run.
 *
 * @param {string} address where the request goes
 * @param {{body: object, images: import("./images.js").Image[]}} request
 * @param {boolean} needsKey
 */
export function curlCommand(address, { body, images }, needsKey) {
  const json = JSON.stringify(body, null, 2);
  const lines = [
    `curl -N ${quoted(address)}`,
    needsKey ? `-H "Authorization: Bearer $TRIOSERVE_API_KEY"` : null,
    `-H 'Content-Type: application/json'`,
    images.length ? `-d @- <<END\n${withFiles(json, images)}\nEND` : `-d ${quoted(json)}`,
  ];
  return lines.filter(Boolean).join(" \\\n  ");
}

/** A shell's here-document that stands for `json`, with the images' files in place of their data. */
function withFiles(json, images) {
  const literal = json.replaceAll(/[\\$`]/g, "\\$&");
  return images.reduce((text, { name, url }) => {
    const head = url.slice(0, url.indexOf(",") + 1);
    const file = `$(base64 < ${quoted(name)} | tr -d '\\n')`;
    return text.replaceAll(`"${url}"`, () => `"${head}${file}"`);
  }, literal);
}

/** One word of a POSIX shell. */
function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}
