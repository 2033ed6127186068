// The server that is asked. A test in Python starts it, and says here where it is.

import assert from 'node:assert/strict';

export const { SERVER_URL: url, SERVER_KEY: key, SERVER_MODEL: model } = process.env;

const MINUTE = 60_000;

async function requestsRunning() {
  const answer = await fetch(`${url}/metrics`, { headers: { Authorization: `Bearer ${key}` } });
  const [, count] = (await answer.text()).match(/^trioserve:num_requests_running\S* (\S+)$/m);
  return Number(count);
}

/** All that a stream gives. */
export async function collected(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

/** Returns when the server computes nothing any more. */
export async function idle() {
  const start = Date.now();
  while (await requestsRunning()) {
    assert.ok(Date.now() - start < MINUTE, 'a request goes on');
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
