/**
 * The API keys that the reader has entered.
 *
 * They are kept for this tab only (sessionStorage), and go nowhere but into the Authorization
 * header of requests to the server that the page came from.
 */

import { addressOf } from "./address.js";

const API_KEY = "trioserve.api-key";
const ADMIN_KEY = "trioserve.admin-key";

/** Tells "change" when keys were entered or forgotten. */
export const access = new EventTarget();

/** @returns {{api: string, admin: string}} the keys, empty for none */
export function keys() {
  return {
    api: sessionStorage.getItem(API_KEY) ?? "",
    admin: sessionStorage.getItem(ADMIN_KEY) ?? "",
  };
}

export function setKeys({ api, admin }) {
  keep(API_KEY, api);
  keep(ADMIN_KEY, admin);
  access.dispatchEvent(new Event("change"));
}

/**
 * The headers that say who asks.
 *
 * @param {boolean} asAdmin with the admin key where there is one, else with the API key; an admin
 *   key alone serves for everything
 */
export function authorization(asAdmin) {
  const { api, admin } = keys();
  const key = asAdmin ? admin || api : api || admin;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

let hasAdminKey = null;

/**
 * Whether the server was started with an admin key. Without one it forbids its control routes
 * (403), whatever key comes.
 *
 * @returns {Promise<boolean>}
 */
export function serverHasAdminKey() {
  hasAdminKey ??= fetch(addressOf("/is_paused"), { headers: authorization(true) }).then(
    ({ status }) => status !== 403,
    () => ((hasAdminKey = null), true), // The server can't be reached: ask again the next time.
  );
  return hasAdminKey;
}

function keep(name, value) {
  if (value) sessionStorage.setItem(name, value);
  else sessionStorage.removeItem(name);
}
