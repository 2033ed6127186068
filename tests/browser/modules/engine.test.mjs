import assert from "node:assert/strict";
import test from "node:test";

import { backoff } from "../../../trioserve/http/api/console/static/engine/backoff.js";
import { History, niceCeiling } from "../../../trioserve/http/api/console/static/engine/history.js";
import { icicle } from "../../../trioserve/http/api/console/static/engine/icicle.js";
import { rowsOf } from "../../../trioserve/http/api/console/static/engine/rows.js";
import {
  barsOf,
  inOrder,
  progressOf,
  spansOf,
} from "../../../trioserve/http/api/console/static/engine/timeline.js";
import { shareCells } from "../../../trioserve/http/api/console/static/engine/waffle.js";
import {
  age,
  count,
  duration,
  figure,
  percent,
} from "../../../trioserve/http/api/console/static/format.js";

test("attempts get rarer, but not ever rarer", () => {
  const waits = [0, 1, 2, 3, 4, 5, 50].map((attempt) => backoff(attempt, 0.5));
  assert.deepEqual(waits, [0.5, 1, 2, 4, 8, 10, 10]);
  assert.ok(backoff(0, 0) < 0.5 && backoff(0, 0.99) > 0.5);
});

test("a history forgets what is too old", () => {
  const history = new History(60);
  for (let at = 0; at <= 200; at += 10) history.add(at, at);
  assert.deepEqual([history.points[0].at, history.points.at(-1).at], [150, 200]);
  assert.deepEqual([history.peak, history.shown], [200, 50]);
});

test("a line is broken where nothing was known, and where nobody looked", () => {
  const history = new History(100);
  for (const [at, value] of [
    [0, 1],
    [1, null],
    [2, 1],
    [3, 2],
    [30, 2],
  ])
    history.add(at, value);
  const path = history.path(300, 10, 2, 3);
  assert.deepEqual(path.match(/[ML]/g), ["M", "M", "L", "M"]);
  assert.ok(path.includes("M300 0h"), "the newest is at the right edge, the most at the top");
});

test("an empty history is an empty line", () => {
  assert.equal(new History(100).path(100, 10, 1, 3), "");
  assert.equal(new History(100).peak, 0);
});

test("an axis ends at a round number", () => {
  assert.deepEqual([0, 0.03, 1, 1.1, 42, 50, 999].map(niceCeiling), [1, 0.05, 1, 2, 50, 50, 1000]);
});

test("a request's spans follow one another up to now, or to its end", () => {
  const timeline = [
    ["waiting", 10],
    ["prefill", 11],
    ["decode", 13],
  ];
  assert.deepEqual(spansOf(timeline, 20).at(-1), { state: "decode", from: 13, to: 20 });
  const ended = spansOf([...timeline, ["finished", 15]], 20);
  assert.deepEqual(ended.at(-1), { state: "decode", from: 13, to: 15 });
});

test("bars are cut off at the window's edges", () => {
  const spans = spansOf(
    [
      ["waiting", 0],
      ["prefill", 5],
      ["decode", 15],
    ],
    20,
  );
  assert.deepEqual(barsOf(spans, 10, 20), [
    { state: "prefill", x: 0, width: 0.5 },
    { state: "decode", x: 0.5, width: 0.5 },
  ]);
});

test("progress counts prompt and output, and isn't known without an end", () => {
  const request = { state: "decode", prompt_tokens: 50, computed_tokens: 60, output_tokens: 10 };
  assert.equal(progressOf({ ...request, max_tokens: 50 }), 0.6);
  assert.equal(progressOf({ ...request, max_tokens: null }), null);
  assert.equal(progressOf({ ...request, state: "finished", max_tokens: null }), 1);
});

test("who runs comes before who waits, and who has ended comes last", () => {
  const states = ["waiting", "finished", "decode", "tokenizing", "prefill", "preempted"];
  const rows = inOrder(states.map((state) => ({ state })));
  assert.deepEqual(
    rows.map(({ state }) => state),
    ["decode", "prefill", "waiting", "tokenizing", "preempted", "finished"],
  );
});

test("cells are shared out to the last one, and nothing that is there goes without", () => {
  assert.deepEqual(shareCells([1, 0, 9999], 100), [1, 0, 99]);
  assert.deepEqual(shareCells([1, 1, 1], 100), [34, 33, 33]);
  assert.deepEqual(shareCells([0, 0, 0], 100), [0, 0, 0]);
  for (let held = 0; held <= 500; held += 7) {
    const shares = shareCells([held, 500 - held, 3], 60);
    assert.equal(
      shares.reduce((a, b) => a + b),
      60,
    );
  }
});

test("a run lies behind its parent, beside all that grew out of it", () => {
  const nodes = [
    { id: 1, parent: null, pages: 4 },
    { id: 2, parent: 1, pages: 3 },
    { id: 3, parent: 1, pages: 2 },
    { id: 4, parent: 3, pages: 1 },
    { id: 5, parent: 99, pages: 2 },
  ];
  const { boxes, width, height } = icicle(nodes);
  const places = boxes.map(({ node, x, y, height }) => [node.id, x, y, height]);
  assert.deepEqual(places, [
    [1, 0, 0, 2],
    [2, 4, 0, 1],
    [3, 4, 1, 1],
    [4, 6, 1, 1],
    [5, 0, 2, 1],
  ]);
  assert.deepEqual([width, height], [7, 3]);
});

test("a tree that is deeper than a stack", () => {
  const nodes = Array.from({ length: 20000 }, (_, id) => ({ id, parent: id - 1, pages: 1 }));
  assert.equal(icicle(nodes).width, 20000);
});

test("a tree's rows, with what is closed left out", () => {
  const leaf = (name) => ({ name, children: [] });
  const tree = {
    name: "root",
    children: [leaf("a"), { name: "b", children: [leaf("c")] }, leaf("a")],
  };
  const all = rowsOf(tree, () => true);
  assert.deepEqual(
    all.map(({ key, level, position, size }) => [key, level, position, size]),
    [
      ["/root", 1, 1, 1],
      ["/root/a", 2, 1, 3],
      ["/root/b", 2, 2, 3],
      ["/root/b/c", 3, 1, 1],
      ["/root/a#2", 2, 3, 3],
    ],
  );
  const some = rowsOf(tree, (key) => key !== "/root/b");
  assert.deepEqual(
    some.map(({ task }) => task.name),
    ["root", "a", "b", "a"],
  );
});

test("numbers as people read them", () => {
  assert.deepEqual([1234567, 0, null].map(count), ["1\u2009234\u2009567", "0", "–"]);
  assert.deepEqual([0.1234, 4.567, 78.94, 1234].map(figure), [
    "0.123",
    "4.57",
    "78.9",
    "1\u2009234",
  ]);
  const durations = [0.0123, 0.4567, 1.234, 45.67, 83, 7384].map(duration);
  assert.deepEqual(
    durations,
    ["12.3 ms", "457 ms", "1.23 s", "45.7 s", "1:23 min", "2:03 h"].map((text) =>
      text.replace(" ", "\u202f"),
    ),
  );
  assert.equal(age(3.9), "3\u202fs");
  assert.deepEqual(
    [0, 0.0123, 0.5].map(percent),
    ["0", "1.2", "50"].map((n) => `${n}\u202f%`),
  );
});
