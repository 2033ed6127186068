/**
 * An answer as it grows out of the events of a stream. Nothing here touches the page.
 *
 * A piece is a text with the tokens that it came from: usually one, several where they can't be
 * told apart in the text (a character of several tokens, a stop string that was held back), and
 * none where no probabilities were asked for. The pieces' texts together are the answer's text.
 */

/**
 * @typedef {{text: string, probability: number}} Alternative
 * @typedef {{text: string, probability: number, alternatives: Alternative[]}} Token
 * @typedef {{kind: "content"|"reasoning", text: string, tokens: Token[]}} Piece
 */

export class Answer {
  id = "";
  /** @type {Piece[]} */
  pieces = [];
  /** @type {string|null} */
  finishReason = null;
  /** @type {{prompt_tokens: number, completion_tokens: number}|null} */
  usage = null;
  #waiting = [];

  /** What was said, without the reasoning. */
  get text() {
    return this.pieces.map(({ kind, text }) => (kind === "content" ? text : "")).join("");
  }

  /** How many tokens it has, as far as the server has told. */
  get numTokens() {
    if (this.usage) return this.usage.completion_tokens;
    return this.pieces.reduce((sum, { tokens }) => sum + Math.max(tokens.length, 1), 0);
  }

  /**
   * Take in an event of a chat or a completion.
   *
   * @param {object} chunk its data
   * @returns {Piece[]} what has been added
   */
  add(chunk) {
    this.id = chunk.id ?? this.id;
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return [];
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const { kind, text } = textOf(choice);
    this.#waiting.push(...tokensOf(choice.logprobs));
    if (!text) return [];
    const added = piecesOf(kind, text, this.#waiting);
    this.#waiting = [];
    this.pieces.push(...added);
    return added;
  }
}

function textOf({ delta, text }) {
  if (!delta) return { kind: "content", text: text ?? "" };
  if (delta.content) return { kind: "content", text: delta.content };
  return { kind: "reasoning", text: delta.reasoning ?? "" };
}

/** One piece a token where the tokens' texts are the text, else one piece of all of them. */
function piecesOf(kind, text, tokens) {
  const areExact = tokens.map((token) => token.text).join("") === text;
  if (!areExact) return [{ kind, text, tokens }];
  return tokens.map((token) => ({ kind, text: token.text, tokens: [token] }));
}

/** The tokens that an event tells of, from the form of chats or that of completions. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) =>
      tokenOf(
        token,
        logprob,
        top_logprobs.map((one) => [one.token, one.logprob]),
      ),
    );
  }
  const { tokens, token_logprobs, top_logprobs } = logprobs;
  return tokens.map((token, i) =>
    tokenOf(token, token_logprobs[i], Object.entries(top_logprobs?.[i] ?? {})),
  );
}

function tokenOf(text, logprob, others) {
  const alternatives = others.map(([text, logprob]) => ({ text, probability: Math.exp(logprob) }));
  alternatives.sort((a, b) => b.probability - a.probability);
  return { text, probability: Math.exp(logprob), alternatives };
}
