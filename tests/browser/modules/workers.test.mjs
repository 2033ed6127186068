import assert from "node:assert/strict";
import test from "node:test";

import {
  keyOf,
  LatestSteps,
} from "../../../trioserve/http/api/console/static/engine/latest_steps.js";
import {
  noticeOf,
  scopeTo,
  severalOf,
  summaryOf,
} from "../../../trioserve/http/api/console/static/engine/scope.js";
import { movesOf } from "../../../trioserve/http/api/console/static/format.js";

const worker = (index, changes = {}) => ({
  index,
  state: "running",
  restarts: 0,
  since: 0,
  last_loss: null,
  pages: { total: 10 + index },
  rates: { steps_per_s: index },
  ...changes,
});

const picture = {
  now: 100,
  worker: { restarts: 5 },
  pages: { total: 33 },
  rates: { steps_per_s: 3, requests_per_s: 7 },
  latency: { ttft: null },
  requests: [
    { id: "a", worker: 0 },
    { id: "b", worker: 2 },
    { id: "c", worker: null },
  ],
  num_requests_left_out: 4,
  steps: [],
  prefix: {
    nodes: [
      { id: 1, worker: 0 },
      { id: 2, worker: 2 },
    ],
    num_left_out: 9,
    left_out_by_worker: { 0: 2, 2: 7 },
  },
  workers: [worker(0), worker(1), worker(2, { restarts: 2 })],
};

test("a worker's part of a picture", () => {
  const scoped = scopeTo(picture, 2);
  assert.equal(scoped.scope, 2);
  const { worker: its, pages, rates } = scoped;
  assert.deepEqual([its.restarts, pages.total, rates.steps_per_s], [2, 12, 2]);
  assert.deepEqual(scoped.requests.map(({ id }) => id), ["b"]);
  assert.deepEqual([scoped.prefix.nodes.length, scoped.prefix.num_left_out], [1, 7]);
  assert.equal(scoped.num_requests_left_out, 0);
  assert.equal(picture.requests.length, 3, "the picture stays as it is");
});

test("all of it without a worker, with one that isn't there, and with a single one", () => {
  assert.deepEqual(scopeTo(picture, null), { ...picture, scope: null });
  assert.deepEqual(scopeTo(picture, 9), { ...picture, scope: null });
  const alone = { ...picture, workers: [worker(0)] };
  assert.deepEqual(scopeTo(alone, 0), { ...alone, scope: null });
  assert.deepEqual(severalOf(alone), []);
  assert.deepEqual(severalOf({}), []);
});

test("how many workers run, and how bad that is", () => {
  const of = (...states) => summaryOf(states.map((state, i) => worker(i, { state })));
  assert.deepEqual(of("running", "running"), ["good", "2 of 2 workers run"]);
  assert.deepEqual(of("running", "starting"), ["warn", "1 of 2 workers run"]);
  assert.deepEqual(of("running", "draining"), ["warn", "1 of 2 workers run"]);
  for (const state of ["restarting", "stalled", "ended"]) {
    assert.deepEqual(of("running", state, "starting"), ["bad", "1 of 3 workers run"]);
  }
});

test("what there is to say of a worker", () => {
  const said = (changes) => noticeOf(worker(2, { since: 90, ...changes }), 100);
  assert.equal(said({}), null);
  assert.equal(said({ state: "starting" }), null);
  const lost = said({ state: "restarting", last_loss: "killed" });
  assert.match(lost, /^Worker 2 was lost \(killed\)\. The/);
  assert.match(said({ state: "stalled" }), /hangs/);
  assert.match(said({ state: "ended" }), /given up\. The/);
  assert.match(said({ restarts: 1 }), /replaced 10 s ago/);
  assert.match(said({ restarts: 1, since: 98 }), /replaced just now/);
  assert.equal(said({ restarts: 1, since: 30 }), null);
});

test("the latest steps of each worker and of all, whichever is slower", () => {
  const latest = new LatestSteps(3);
  const step = (worker, number, at) => ({ worker, number, at });
  const workers = [{ index: 0 }, { index: 1 }];
  const steps = [step(0, 1, 1), step(1, 50, 1.5), step(0, 2, 2), step(0, 3, 3), step(0, 4, 4)];
  for (let shown = 0; shown < 2; shown++) latest.add({ steps, workers });
  assert.deepEqual(latest.of(0).map(keyOf), ["0:2", "0:3", "0:4"]);
  assert.deepEqual(latest.of(1).map(keyOf), ["1:50"]);
  assert.deepEqual(latest.of(null).map(keyOf), ["0:2", "0:3", "0:4"]);
  latest.add({ steps: [step(0, 1, 9)], workers: [{ index: 0 }] });
  assert.deepEqual(latest.of(0).map(keyOf), ["0:1"], "numbers began anew");
  assert.deepEqual(latest.of(1), []);
});

test("how often a request moved", () => {
  assert.deepEqual([1, 2].map((moves) => movesOf({ moves })), ["moved once", "moved 2 times"]);
});
