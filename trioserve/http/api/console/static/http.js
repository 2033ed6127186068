/** Requests to the server, whole or streamed, and what it says of those that it refuses. */

import { authorization } from "./access.js";
import { addressOf } from "./address.js";
import { EventParser } from "./sse.js";

/** What the server answered instead of doing as it was asked. */
export class ServerError extends Error {
  /**
   * @param {number} status HTTP's, 0 where there was no answer or a stream told of the error
   * @param {{message: string, param?: string|null, code?: string|null}} detail
   */
  constructor(status, { message, param = null, code = null }) {
    super(message);
    this.status = status;
    this.param = param;
    this.code = code;
  }

  /** The message, without the field's name where it begins with that. */
  get reason() {
    const prefix = `${this.param}: `;
    return this.message.startsWith(prefix) ? this.message.slice(prefix.length) : this.message;
  }
}

/**
 * @typedef {object} Options
 * @property {object} [body] sent as JSON; without one, the request is a GET
 * @property {string} [method] another one
 * @property {AbortSignal} [signal] ends the request, and with it what the server does for it
 * @property {boolean} [asAdmin] whether the admin key is sent, where there is one
 */

/**
 * The JSON that the server answers.
 *
 * @param {string} path
 * @param {Options} options
 * @throws {ServerError}
 */
export async function call(path, options = {}) {
  return (await send(path, options)).json();
}

/**
 * The events that the server streams, as they come. Leaving the loop closes the connection.
 *
 * @param {string} path
 * @param {Options} options
 * @returns {AsyncGenerator<import("./sse.js").ServerEvent>}
 * @throws {ServerError}
 */
export async function* events(path, options = {}) {
  const response = await send(path, options);
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(unreachable("The connection was lost."));
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

/** The error that a body tells of, as a reply or as an event of a stream. */
export function errorIn(body, status = 0) {
  return body?.error?.message ? new ServerError(status, body.error) : null;
}

async function send(path, { body, method, signal, asAdmin = false }) {
  const headers = authorization(asAdmin);
  const init = { headers, signal, cache: "no-store", credentials: "omit" };
  init.method = method ?? (body === undefined ? "GET" : "POST");
  if (body !== undefined) {
    init.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(addressOf(path), init).catch(
    unreachable("The server can't be reached."),
  );
  if (response.ok) return response;
  const reply = await response.json().catch(() => null);
  throw (
    errorIn(reply, response.status) ??
    new ServerError(response.status, { message: `The server answered ${response.status}.` })
  );
}

/** What to do about an error of the network: an abort stays one, the rest is `message`. */
function unreachable(message) {
  return (error) => {
    throw error.name === "AbortError" ? error : new ServerError(0, { message });
  };
}
