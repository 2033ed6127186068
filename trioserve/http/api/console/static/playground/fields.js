/**
 * The sampling parameters that the playground offers, in its order.
 *
 * A field that is left empty isn't sent: the server's own default holds. Ranges are those of the
 * server, which alone decides; a value outside is sent, and its refusal is shown at the field.
 * `slide` is the part of the range that a slider is good for. Nothing here touches the page.
 */

/**
 * @typedef {object} Field
 * @property {string} name as the request's body has it
 * @property {string} label
 * @property {"number"|"lines"} kind
 * @property {string} hint what it does, and its range
 * @property {string} [usual] what holds if it is left empty
 * @property {number} [min]
 * @property {number} [max]
 * @property {number|"any"} [step]
 * @property {[number, number]} [slide]
 */

/** @type {Field[]} */
export const FIELDS = [
  number("temperature", "Temperature", "0 to 100; 0 takes the most probable token", {
    usual: "1",
    min: 0,
    max: 100,
    step: 0.05,
    slide: [0, 2],
  }),
  number("top_p", "Top p", "above 0, up to 1: the most probable tokens that reach it", {
    usual: "1",
    min: 0,
    max: 1,
    step: 0.01,
    slide: [0, 1],
  }),
  number("min_p", "Min p", "0 to 1, times the most probable token's probability", {
    usual: "0",
    min: 0,
    max: 1,
    step: 0.01,
    slide: [0, 1],
  }),
  number("top_k", "Top k", "at least 1 token; 0 or −1 for all", { usual: "all", min: -1, step: 1 }),
  number(
    "max_tokens",
    "Max tokens",
    "at least 0; if empty, all the context leaves (16 in a completion)",
    {
      usual: "default",
      min: 0,
      step: 1,
    },
  ),
  number("seed", "Seed", "a 64-bit integer; the same one draws the same", {
    usual: "random",
    step: 1,
  }),
  number("presence_penalty", "Presence penalty", "−2 to 2, once for tokens that occurred", {
    usual: "0",
    min: -2,
    max: 2,
    step: 0.1,
    slide: [-2, 2],
  }),
  number("frequency_penalty", "Frequency penalty", "−2 to 2, for each time they occurred", {
    usual: "0",
    min: -2,
    max: 2,
    step: 0.1,
    slide: [-2, 2],
  }),
  number("repetition_penalty", "Repetition penalty", "above 0; 1 for none", {
    usual: "1",
    min: 0,
    step: 0.05,
    slide: [0.5, 2],
  }),
  {
    name: "stop",
    label: "Stop strings",
    kind: "lines",
    hint: "one a line, up to 64; \\n stands for the end of a line",
  },
];

/**
 * The request's fields, from what was typed.
 *
 * @param {Record<string, string>} typed by the fields' names
 * @returns {Record<string, number|string|string[]>} those that aren't empty
 */
export function valuesOf(typed) {
  const values = {};
  for (const { name, kind } of FIELDS) {
    const text = (typed[name] ?? "").trim();
    if (text) values[name] = kind === "lines" ? linesOf(typed[name]) : numberOf(text);
  }
  return values;
}

/** The strings that lines stand for; empty lines are none. */
function linesOf(text) {
  return text
    .split("\n")
    .filter(Boolean)
    .map((line) => line.replaceAll("\\n", "\n"));
}

/** The number; or the text, for the server to refuse. An integer past 2⁵³ isn't rounded quietly. */
function numberOf(text) {
  const number = Number(text);
  const isWhole = /^[-+]?\d+$/.test(text);
  return Number.isFinite(number) && (!isWhole || Number.isSafeInteger(number)) ? number : text;
}

function number(name, label, hint, range) {
  return { name, label, kind: "number", hint, ...range };
}
