/** Where the server's routes are: beside this page, whatever path a proxy has put in front. */

const ROOT = new URL("../../", import.meta.url);

/**
 * @param {string} path a route, such as "/v1/models"
 * @returns {string} its whole address
 */
export function addressOf(path) {
  return new URL(`.${path}`, ROOT).href;
}
