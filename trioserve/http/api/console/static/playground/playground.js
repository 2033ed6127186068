/** The playground: chat and completion over one form of settings; one answer runs at a time. */

import { keys } from "../access.js";
import { addressOf } from "../address.js";
import { call, errorIn, events, ServerError } from "../http.js";
import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { Layout } from "./layout.js";
import { curlCommand } from "./requests.js";
import { Settings } from "./settings.js";
import { StallWatch } from "./stall_watch.js";

export class Playground {
  #settings = new Settings();
  #layout = new Layout(this.#settings.element, {
    submit: () => this.#modes[this.#mode].submit(),
    stop: () => this.stop(),
    clear: () => this.clear(),
    setMode: (mode) => this.setMode(mode),
  });
  #modes;
  #mode = "chat";
  #running = null;

  /**
   * @param {HTMLElement} place where it is shown
   * @param {object} page
   * @param {(why: string) => void} page.askForKey
   * @param {(name: string) => void} page.onModel told what the server's model is called
   */
  constructor(place, { askForKey, onModel }) {
    this.askForKey = askForKey;
    this.onModel = onModel;
    const playground = {
      settings: () => this.#settings.values(),
      run: (request, view) => this.#run(request, view),
      curl: (request) => curlCommand(addressOf(request.path), request, Boolean(keys().api)),
      say: (message) => this.#layout.say(message),
    };
    this.#modes = { chat: new Chat(playground), completion: new Completion(playground) };
    place.append(this.#layout.element);
    this.setMode("chat");
  }

  /** Ask the server which models it serves, and if they read media; for a key, if it wants one. */
  async loadModels() {
    try {
      const [{ data }, model] = await Promise.all([call("/v1/models"), call("/model_info")]);
      const hearing = model.has_audio_understanding ? "audio" : null;
      this.#modes.chat.offerMedia(model.has_image_understanding ? "image" : hearing);
      this.#settings.setModels(data);
      this.onModel(data.find(({ parent }) => !parent)?.id ?? "");
    } catch (error) {
      if (error.status === 401) this.askForKey("This server wants an API key.");
      else this.#layout.say(error.message);
    }
  }

  /** @param {"chat"|"completion"} mode */
  setMode(mode) {
    this.#mode = mode;
    this.#layout.showMode(mode, this.#modes[mode]);
  }

  otherMode() {
    this.setMode(this.#mode === "chat" ? "completion" : "chat");
  }

  focus() {
    this.#modes[this.#mode].input.focus();
  }

  clear() {
    this.stop();
    this.#modes[this.#mode].clear();
    this.focus();
  }

  /** End the answer that is coming; its request ends at the server, too. */
  stop() {
    this.#running?.abort();
  }

  /**
   * Stream the answer to `request` into `view`.
   *
   * @returns {Promise<boolean>} whether the server refused the request
   * @param {{path: string, body: object}} request
   * @param {import("./answer_view.js").AnswerView} view
   */
  async #run({ path, body }, view) {
    this.stop();
    const run = new AbortController();
    this.#running = run;
    this.#settings.clearErrors();
    this.#layout.showRunning(true);
    const stalls = new StallWatch((note) => view.note(note));
    try {
      for await (const { data } of events(path, { body, signal: run.signal })) {
        stalls.received();
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        const error = errorIn(chunk);
        if (error) throw error;
        this.#layout.keepTheEndInSight(() => view.add(chunk));
      }
      view.end();
      return false;
    } catch (error) {
      this.#failed(error, view);
      return error.status >= 400;
    } finally {
      stalls.end();
      if (this.#running === run) {
        this.#running = null;
        this.#layout.showRunning(false);
      }
    }
  }

  #failed(error, view) {
    if (error.name === "AbortError") {
      view.end("stopped");
      return;
    }
    if (!(error instanceof ServerError)) throw error;
    if (error.param) this.#settings.showError(error.param, error.reason);
    this.#layout.keepTheEndInSight(() => view.fail(error, this.askForKey));
  }
}
