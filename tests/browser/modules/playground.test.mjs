import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test from "node:test";

import { Answer } from "../../../trioserve/http/api/console/static/playground/answer.js";
import { FIELDS, valuesOf } from "../../../trioserve/http/api/console/static/playground/fields.js";
import {
  chatRequest,
  completionRequest,
  curlCommand,
} from "../../../trioserve/http/api/console/static/playground/requests.js";
import { cutSentences } from "../../../trioserve/http/api/console/static/playground/sentences.js";
import { Speed } from "../../../trioserve/http/api/console/static/playground/speed.js";

const SETTINGS = { model: "m", system: "", alternatives: 0, sampling: {} };

function chatChunk(content, tokens = [], more = {}) {
  const logprobs = tokens.map(([token, probability]) => ({
    token,
    logprob: Math.log(probability),
    top_logprobs: [{ token: "other", logprob: Math.log(0.25) }],
  }));
  return {
    id: "chatcmpl-1",
    choices: [
      { delta: { content }, logprobs: tokens.length ? { content: logprobs } : null, ...more },
    ],
  };
}

test("what was typed becomes values, and what is empty isn't sent", () => {
  const typed = { temperature: "0.5", top_k: " 40 ", seed: "", stop: "\\n\\n\nEnd\n" };
  assert.deepEqual(valuesOf(typed), { temperature: 0.5, top_k: 40, stop: ["\n\n", "End"] });
});

test("what is no number, or one that would be rounded, is left for the server to refuse", () => {
  const values = valuesOf({ temperature: "hot", seed: "9223372036854775807" });
  assert.deepEqual(values, { temperature: "hot", seed: "9223372036854775807" });
});

test("a slider's part lies in its field's range", () => {
  for (const { name, min = -Infinity, max = Infinity, slide } of FIELDS) {
    if (slide) assert.ok(min <= slide[0] && slide[0] < slide[1] && slide[1] <= max, name);
  }
});

test("the body of a chat", () => {
  const settings = { ...SETTINGS, system: "Be brief.", alternatives: 3, sampling: { seed: 1 } };
  const { path, body } = chatRequest(settings, [{ role: "user", text: "Hi", media: [] }]);
  assert.equal(path, "/v1/chat/completions");
  assert.deepEqual(body.messages, [
    { role: "system", content: "Be brief." },
    { role: "user", content: "Hi" },
  ]);
  assert.deepEqual([body.logprobs, body.top_logprobs, body.seed, body.stream], [true, 3, 1, true]);
});

test("without alternatives no probabilities are asked for", () => {
  assert.ok(!("logprobs" in chatRequest(SETTINGS, []).body));
  assert.ok(!("logprobs" in completionRequest(SETTINGS, "a").body));
  assert.equal(completionRequest({ ...SETTINGS, alternatives: 2 }, "a").body.logprobs, 2);
});

test("a file of audio becomes a part of audio", () => {
  const url = "data:audio/wav;base64,AAAA";
  const turn = { role: "user", text: "", media: [{ name: "a.wav", url }] };
  const [{ content }] = chatRequest(SETTINGS, [turn]).body.messages;
  assert.deepEqual(content, [{ type: "audio_url", audio_url: { url } }]);
});

test("images come before the text, and may come without one", () => {
  const media = [{ name: "a.png", url: "data:image/png;base64,AAAA" }];
  const { body } = chatRequest(SETTINGS, [
    { role: "user", text: "Hi", media },
    { role: "user", text: "", media },
  ]);
  const part = { type: "image_url", image_url: { url: media[0].url } };
  assert.deepEqual(
    body.messages.map(({ content }) => content),
    [[part, { type: "text", text: "Hi" }], [part]],
  );
});

const STRANGE = 'it\'s $HOME, "quoted"\n`ls` \\ \\n';

test("a shell reads the curl command as it was meant", () => {
  const body = { prompt: STRANGE };
  const command = curlCommand("http://localhost/v1/completions", { body, media: [] }, true);
  const shown = execFileSync("sh", ["-c", `curl() { printf '%s\\0' "$@"; }; ${command}`], {
    env: { ...process.env, TRIOSERVE_API_KEY: "secret" },
  });
  const words = shown.toString().split("\0");
  assert.deepEqual(words.slice(0, 4), [
    "-N",
    "http://localhost/v1/completions",
    "-H",
    "Authorization: Bearer secret",
  ]);
  assert.deepEqual(JSON.parse(words.at(-2)), body);
});

test("the curl command reads images from their files", (t) => {
  const folder = mkdtempSync(join(tmpdir(), "images-"));
  t.after(() => rmSync(folder, { recursive: true }));
  const media = ["it's `$(here)` \\.png", "-n"].map((name, i) => {
    const data = Buffer.alloc(150_000, i + 1);
    writeFileSync(join(folder, name), data);
    return { name, url: `data:image/png;base64,${data.toString("base64")}` };
  });
  const request = chatRequest(SETTINGS, [{ role: "user", text: STRANGE, media }]);
  const command = curlCommand("http://localhost", request, false);
  assert.ok(command.length < 2000);
  for (const shell of ["sh", "bash"]) {
    const sent = execFileSync(shell, ["-c", `curl() { cat; }; ${command}`], { cwd: folder });
    assert.deepEqual(JSON.parse(sent.toString()), request.body);
  }
});

test("an answer without probabilities", () => {
  const answer = new Answer();
  for (const text of ["Hel", "lo"]) answer.add(chatChunk(text));
  answer.add({ choices: [{ delta: {}, finish_reason: "stop" }] });
  answer.add({ choices: [], usage: { prompt_tokens: 3, completion_tokens: 2 } });
  assert.equal(answer.text, "Hello");
  assert.deepEqual([answer.id, answer.finishReason, answer.numTokens], ["chatcmpl-1", "stop", 2]);
});

test("an event of several tokens becomes a piece for each", () => {
  const pieces = new Answer().add(
    chatChunk("ab c", [
      ["ab", 0.5],
      [" c", 0.25],
    ]),
  );
  assert.deepEqual(
    pieces.map(({ text }) => text),
    ["ab", " c"],
  );
  assert.ok(Math.abs(pieces[0].tokens[0].probability - 0.5) < 1e-9);
  assert.equal(pieces[1].tokens[0].alternatives[0].text, "other");
});

test("a character of several tokens is one piece of all of them", () => {
  const answer = new Answer();
  assert.deepEqual(answer.add(chatChunk("", [["\uFFFD", 0.9]])), []);
  const [piece, ...others] = answer.add(chatChunk("é", [["\uFFFD", 0.8]]));
  assert.deepEqual([piece.text, piece.tokens.length, others.length], ["é", 2, 0]);
});

test("reasoning isn't part of the answer's text", () => {
  const answer = new Answer();
  answer.add({ choices: [{ delta: { reasoning: "Hm." } }] });
  answer.add(chatChunk("Yes"));
  assert.deepEqual(
    answer.pieces.map(({ kind }) => kind),
    ["reasoning", "content"],
  );
  assert.equal(answer.text, "Yes");
});

test("a completion's probabilities, the most probable first", () => {
  const logprobs = {
    tokens: ["a"],
    token_logprobs: [Math.log(0.2)],
    top_logprobs: [{ a: Math.log(0.2), b: Math.log(0.7) }],
  };
  const [piece] = new Answer().add({ choices: [{ text: "a", logprobs }] });
  assert.deepEqual(
    piece.tokens[0].alternatives.map(({ text }) => text),
    ["b", "a"],
  );
});

test("speed", () => {
  const speed = new Speed(10);
  assert.deepEqual([speed.timeToFirstToken, speed.rate(0)], [null, null]);
  speed.received(10.5);
  assert.deepEqual([speed.timeToFirstToken, speed.rate(1)], [0.5, null]);
  speed.received(12.5);
  assert.equal(speed.rate(21), 10);
});

test("whole sentences are told, and the rest waits", () => {
  assert.deepEqual(cutSentences("One. Two! Th"), ["One. Two!", "Th"]);
  assert.deepEqual(cutSentences("3.14 is"), ["", "3.14 is"]);
  assert.deepEqual(cutSentences("A line\nand"), ["A line", "and"]);
});
