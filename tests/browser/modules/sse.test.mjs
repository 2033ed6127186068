import assert from "node:assert/strict";
import test from "node:test";

import { EventParser } from "../../../trioserve/http/api/console/static/sse.js";

const STREAM =
  '\uFEFFevent: hello\ndata: {"a":1}\n\n: a comment\n\ndata: one\r\ndata:two\r\n\r\n' +
  "data\r\rid: 7\nretry: 5\ndata: ends\n\ndata: never dispatched\n";
const EVENTS = [
  { event: "hello", data: '{"a":1}' },
  { event: "message", data: "one\ntwo" },
  { event: "message", data: "" },
  { event: "message", data: "ends" },
];

test("a whole stream", () => {
  assert.deepEqual(new EventParser().push(STREAM), EVENTS);
});

test("a stream that is cut anywhere, between \\r and \\n too", () => {
  for (let cut = 0; cut <= STREAM.length; cut++) {
    const parser = new EventParser();
    const events = [...parser.push(STREAM.slice(0, cut)), ...parser.push(STREAM.slice(cut))];
    assert.deepEqual(events, EVENTS, `cut at ${cut}`);
  }
});

test("a stream in single characters", () => {
  const parser = new EventParser();
  assert.deepEqual(
    [...STREAM].flatMap((character) => parser.push(character)),
    EVENTS,
  );
});

test("an event's name is that of one event only", () => {
  const [first, second] = new EventParser().push("event: a\ndata: 1\n\ndata: 2\n\n");
  assert.deepEqual([first.event, second.event], ["a", "message"]);
});
