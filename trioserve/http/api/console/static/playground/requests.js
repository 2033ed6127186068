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
 * @param {{role: string, content: string}[]} messages without the system prompt
 */
export function chatRequest({ model, system, alternatives, sampling }, messages) {
  const instruction = system ? [{ role: "system", content: system }] : [];
  const probabilities = alternatives ? { logprobs: true, top_logprobs: alternatives } : {};
  return {
    path: "/v1/chat/completions",
    body: {
      model,
      messages: [...instruction, ...messages],
      ...sampling,
      ...probabilities,
      ...STREAMED,
    },
  };
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
  };
}

/**
 * A shell's command that makes the request. Keys stay out of it.
 *
 * @param {string} address where the request goes
 * @param {object} body
 * @param {boolean} needsKey
 */
export function curlCommand(address, body, needsKey) {
  const lines = [
    `curl -N ${quoted(address)}`,
    needsKey ? `-H "Authorization: Bearer $TRIOSERVE_API_KEY"` : null,
    `-H 'Content-Type: application/json'`,
    `-d ${quoted(JSON.stringify(body, null, 2))}`,
  ];
  return lines.filter(Boolean).join(" \\\n  ");
}

/** One word of a POSIX shell. */
function quoted(text) {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}
