// What programs do with the package `openai`.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import OpenAI from 'openai';
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod';
import { z } from 'zod';

import { collected, idle, key, model, url } from './server.js';

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });

const capital = [{ role: 'user', content: 'What is the capital of France?' }];
const greedy = { model, temperature: 0, max_tokens: 40 };
const City = z.object({ name: z.enum(['Paris', 'London']), large: z.boolean() });
const Place = z.object({ city: z.string().max(20), unit: z.enum(['celsius', 'fahrenheit']) });
const weather = {
  type: 'function',
  function: {
    name: 'weather',
    description: 'The weather in a city',
    parameters: z.toJSONSchema(Place),
  },
};
const weatherAsked = {
  ...greedy,
  max_tokens: 80,
  messages: [{ role: 'user', content: 'What is the weather in Paris?' }],
  tools: [weather],
  tool_choice: { type: 'function', function: { name: 'weather' } },
};

test('the models', async () => {
  const models = await collected(client.models.list());
  assert.deepEqual(models.map(({ id }) => id), [model]);
  assert.equal((await client.models.retrieve(model)).owned_by, 'trioserve');
});

test('a chat, and the same chat streamed', async () => {
  const whole = await client.chat.completions.create({ ...greedy, messages: capital });
  const { prompt_tokens, completion_tokens, total_tokens } = whole.usage;
  assert.equal(total_tokens, prompt_tokens + completion_tokens);

  const stream = await client.chat.completions.create({
    ...greedy,
    messages: capital,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = '';
  let usage;
  const reasons = [];
  for await (const chunk of stream) {
    usage = chunk.usage ?? usage;
    for (const { delta, finish_reason } of chunk.choices) {
      text += delta.content ?? '';
      if (finish_reason) reasons.push(finish_reason);
    }
  }
  assert.ok(text);
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(reasons, [whole.choices[0].finish_reason]);
  assert.equal(usage.completion_tokens, completion_tokens);
});

test('the events of a stream', async () => {
  const stream = client.chat.completions.stream({ ...greedy, messages: capital });
  let last;
  stream.on('content', (_delta, snapshot) => (last = snapshot));
  const final = await stream.finalChatCompletion();
  assert.ok(last);
  assert.equal(last, final.choices[0].message.content);
  assert.equal(await stream.finalContent(), last);
});

test('a completion, and the same completion streamed', async () => {
  const options = { ...greedy, prompt: 'The capital of France is', max_tokens: 12 };
  const whole = await client.completions.create(options);
  const chunks = await collected(await client.completions.create({ ...options, stream: true }));
  assert.ok(whole.choices[0].text);
  assert.equal(chunks.map(({ choices }) => choices[0].text).join(''), whole.choices[0].text);
});

test('several choices, log probabilities and stop strings', async () => {
  const options = { ...greedy, prompt: 'Once upon a time', max_tokens: 8 };
  const drawn = { temperature: 1, seed: 5, n: 3, logprobs: 2 };
  const several = await client.completions.create({ ...options, ...drawn });
  assert.deepEqual(several.choices.map(({ index }) => index), [0, 1, 2]);
  for (const { logprobs } of several.choices) {
    assert.ok(logprobs.token_logprobs.every((value) => value <= 0));
    assert.ok(logprobs.top_logprobs.every((top) => Object.keys(top).length >= 2));
  }
  const [{ text }] = (await client.completions.create(options)).choices;
  const stop = text.slice(text.length / 2);
  const [stopped] = (await client.completions.create({ ...options, stop })).choices;
  assert.equal(stopped.finish_reason, 'stop');
  assert.equal(stopped.text, text.slice(0, text.indexOf(stop)));
});

test('a tool that has to be called, whole and streamed', async () => {
  const whole = await client.chat.completions.create(weatherAsked);
  const [{ message, finish_reason }] = whole.choices;
  assert.equal(message.content, null);
  const [call] = message.tool_calls;
  assert.equal(call.function.name, 'weather');
  Place.parse(JSON.parse(call.function.arguments));

  const streamed = await client.chat.completions.stream(weatherAsked).finalChatCompletion();
  const [same] = streamed.choices[0].message.tool_calls;
  assert.deepEqual(same.function, { ...same.function, ...call.function });
  assert.equal(streamed.choices[0].finish_reason, finish_reason);

  const messages = [
    ...weatherAsked.messages,
    message,
    { role: 'tool', tool_call_id: call.id, content: 'It rains.' },
  ];
  const answer = await client.chat.completions.create({ ...greedy, messages, max_tokens: 8 });
  assert.ok(answer.choices[0].message.content);
});

test('a tool that the client runs by itself', async () => {
  const places = [];
  const run = (place) => {
    places.push(place);
    return 'It rains.';
  };
  const runner = client.chat.completions.runTools({
    ...weatherAsked,
    stream: true,
    tools: [{ type: 'function', function: { ...weather.function, function: run, parse: JSON.parse } }],
  });
  await runner.done();
  assert.equal(places.length, 1);
  Place.parse(places[0]);
  assert.equal(runner.messages.at(-1).role, 'tool');
});

test('an answer as an object', async () => {
  const completion = await client.chat.completions.parse({
    ...greedy,
    messages: capital,
    response_format: zodResponseFormat(City, 'city'),
  });
  City.parse(completion.choices[0].message.parsed);
});

test('responses: a conversation, streamed, as an object', async () => {
  const options = { model, temperature: 0, max_output_tokens: 40 };
  const first = await client.responses.create({ ...options, input: 'My name is Ada.' });
  assert.ok(first.output_text);
  const second = await client.responses
    .stream({ ...options, input: 'What is my name?', previous_response_id: first.id })
    .on('response.output_text.delta', ({ snapshot }) => assert.ok(snapshot))
    .finalResponse();
  assert.ok(second.output_text);
  assert.ok(second.usage.input_tokens > first.usage.input_tokens);
  const parsed = await client.responses.parse({
    ...options,
    input: 'Which city is it?',
    text: { format: zodTextFormat(City, 'city') },
  });
  City.parse(parsed.output_parsed);
});

test('embeddings', async () => {
  const { data } = await client.embeddings.create({ model, input: ['a cat', 'a dog'] });
  assert.equal(data.length, 2);
  assert.equal(data[0].embedding.length, data[1].embedding.length);
  assert.ok(data[0].embedding.every(Number.isFinite));
});

test('errors are those that the client knows', async () => {
  const ask = (options) => client.chat.completions.create({ ...greedy, messages: capital, ...options });
  await assert.rejects(ask({ model: 'gpt-4' }), OpenAI.NotFoundError);
  await assert.rejects(ask({ temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, 'temperature');
    return true;
  });
  await assert.rejects(ask({ stream: true, top_p: 7 }), OpenAI.BadRequestError);
  const long = [{ role: 'user', content: 'word '.repeat(9000) }];
  await assert.rejects(ask({ messages: long }), { status: 400, code: 'context_length_exceeded' });
  const stranger = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'wrong', maxRetries: 0 });
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
});

const endless = { model, prompt: 'Once', max_tokens: 4000, ignore_eos: true };

test('leaving a stream aborts it', async () => {
  for await (const chunk of await client.completions.create({ ...endless, stream: true })) {
    assert.equal(chunk.object, 'text_completion');
    break;
  }
  await idle();
});

test('an abort signal and a timeout abort a request', async () => {
  const controller = new AbortController();
  const stream = await client.completions.create(
    { ...endless, stream: true },
    { signal: controller.signal },
  );
  for await (const _ of stream) controller.abort();
  await idle();
  const whole = client.completions.create(endless, { timeout: 500 });
  await assert.rejects(whole, OpenAI.APIConnectionTimeoutError);
  await idle();
});
