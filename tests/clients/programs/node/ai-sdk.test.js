// What programs do with the AI SDK: the packages `ai` and `@ai-sdk/openai-compatible`.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import {
  APICallError,
  Output,
  embed,
  embedMany,
  generateObject,
  generateText,
  isStepCount,
  streamObject,
  streamText,
  tool,
} from 'ai';
import { z } from 'zod';

import { collected, idle, key, model as name, url } from './server.js';

globalThis.AI_SDK_LOG_WARNINGS = false;

const provider = (options) =>
  createOpenAICompatible({
    name: 'trioserve',
    baseURL: `${url}/v1`,
    apiKey: key,
    includeUsage: true,
    supportsStructuredOutputs: true,
    ...options,
  });

const server = provider();
const model = server(name);
const prompt = 'What is the capital of France?';
const greedy = { model, temperature: 0, maxOutputTokens: 40, maxRetries: 0 };
const City = z.object({ name: z.enum(['Paris', 'London']), large: z.boolean() });
const Place = z.object({ city: z.string().max(20), unit: z.enum(['celsius', 'fahrenheit']) });
const weather = tool({
  description: 'The weather in a city',
  inputSchema: Place,
  execute: ({ city }) => `It rains in ${city}.`,
});
const weatherAsked = {
  ...greedy,
  maxOutputTokens: 80,
  prompt: 'What is the weather in Paris?',
  tools: { weather },
  toolChoice: { type: 'tool', toolName: 'weather' },
};

test('a text, and the same text streamed', async () => {
  const whole = await generateText({ ...greedy, prompt });
  const streamed = streamText({ ...greedy, prompt });
  const pieces = await collected(streamed.textStream);
  assert.ok(pieces.length > 1);
  assert.equal(pieces.join(''), whole.text);
  assert.equal(await streamed.finishReason, whole.finishReason);
  const { inputTokens, outputTokens, totalTokens } = await streamed.usage;
  assert.equal(totalTokens, inputTokens + outputTokens);
  assert.equal(outputTokens, whole.usage.outputTokens);
});

test('a conversation with instructions', async () => {
  const { text, response } = await generateText({
    ...greedy,
    instructions: 'You are a geographer.',
    messages: [
      { role: 'user', content: 'My favourite city is Rome.' },
      { role: 'assistant', content: 'A fine city.' },
      { role: 'user', content: [{ type: 'text', text: 'Which one did I name?' }] },
    ],
  });
  assert.ok(text);
  assert.equal(response.modelId, name);
});

test('sampling, stop sequences and a length', async () => {
  const options = { ...greedy, prompt, temperature: 0.9, topP: 0.9, seed: 7, maxOutputTokens: 12 };
  const first = await generateText({
    ...options,
    frequencyPenalty: 0.1,
    presencePenalty: 0.1,
    providerOptions: { trioserve: { top_k: 20, repetition_penalty: 1.05 } },
  });
  assert.ok(first.text);
  const { text } = await generateText({ ...greedy, prompt });
  const stop = text.slice(text.length / 2);
  const stopped = await generateText({ ...greedy, prompt, stopSequences: [stop] });
  assert.equal(stopped.text, text.slice(0, text.indexOf(stop)));
  assert.equal(stopped.finishReason, 'stop');
  const short = await generateText({ ...greedy, prompt, maxOutputTokens: 2 });
  assert.equal(short.finishReason, 'length');
});

test('a completion, whole and streamed', async () => {
  const options = { ...greedy, model: server.completionModel(name), prompt: 'Once upon a time' };
  const { text } = await generateText({ ...options, maxOutputTokens: 8 });
  const { textStream } = streamText({ ...options, maxOutputTokens: 8 });
  assert.equal((await collected(textStream)).join(''), text);
});

test('an object, whole and streamed', async () => {
  const asked = { ...greedy, prompt, schema: City };
  const { object } = await generateObject(asked);
  City.parse(object);
  const streamed = streamObject(asked);
  const partials = await collected(streamed.partialObjectStream);
  assert.deepEqual(partials.at(-1), object);
  assert.deepEqual(await streamed.object, object);
});

test('an object, an array and a choice as the output of a text', async () => {
  const ask = (output) => generateText({ ...greedy, maxOutputTokens: 120, prompt, output });
  City.parse((await ask(Output.object({ schema: City }))).output);
  const { output } = await ask(Output.choice({ options: ['yes', 'no'] }));
  assert.ok(['yes', 'no'].includes(output));
  const words = Output.array({ element: z.enum(['river', 'bridge']) });
  const { partialOutputStream } = streamText({ ...greedy, prompt, output: words });
  const partials = await collected(partialOutputStream);
  assert.ok(partials.length);
  assert.ok(partials.every(Array.isArray));
});

test('an object of any form', async () => {
  const asked = { ...greedy, prompt: 'Describe a city as JSON.', output: 'no-schema' };
  const [first] = await collected(streamObject(asked).partialObjectStream);
  assert.equal(typeof first, 'object');
});

test('a tool that has to be called, whole and streamed', async () => {
  const whole = await generateText(weatherAsked);
  const [call] = whole.toolCalls;
  const [result] = whole.toolResults;
  Place.parse(call.input);
  assert.equal(result.output, `It rains in ${call.input.city}.`);

  const streamed = streamText(weatherAsked);
  const parts = await collected(streamed.stream);
  const kinds = new Set(parts.map(({ type }) => type));
  for (const kind of ['tool-input-start', 'tool-input-delta', 'tool-call', 'tool-result', 'finish'])
    assert.ok(kinds.has(kind), `no ${kind} among ${[...kinds]}`);
  const [same] = await streamed.toolCalls;
  assert.deepEqual(same.input, call.input);
  assert.equal(await streamed.finishReason, whole.finishReason);
});

test('several steps: a tool, and an answer that knows its result', async () => {
  const { steps, text } = await generateText({
    ...weatherAsked,
    prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: 'none' } : {}),
    stopWhen: isStepCount(2),
  });
  assert.deepEqual(steps.map(({ toolResults }) => toolResults.length), [1, 0]);
  assert.ok(text);
});

test('embeddings', async () => {
  const embedder = server.embeddingModel(name);
  const { embeddings } = await embedMany({ model: embedder, values: ['a cat', 'a dog'] });
  assert.equal(embeddings.length, 2);
  const { embedding, usage } = await embed({ model: embedder, value: 'a cat' });
  assert.equal(embedding.length, embeddings[0].length);
  assert.ok(usage.tokens > 0);
  await assert.rejects(
    embed({ model: server.embeddingModel('no-such'), value: 'a cat', maxRetries: 0 }),
    { statusCode: 404 },
  );
});

test('errors have the status and the words of the server', async () => {
  const ask = (options) => generateText({ ...greedy, prompt, ...options });
  await assert.rejects(ask({ model: server('gpt-4') }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 404);
    assert.match(error.message, /gpt-4/);
    return true;
  });
  await assert.rejects(ask({ prompt: 'word '.repeat(9000) }), { statusCode: 400, message: /8192/ });
  await assert.rejects(ask({ temperature: -1 }), { statusCode: 400, message: /temperature/ });
  const stranger = provider({ apiKey: 'wrong' });
  await assert.rejects(ask({ model: stranger(name) }), { statusCode: 401 });
  let told;
  const stream = streamText({
    ...greedy,
    prompt,
    model: server('gpt-4'),
    onError: ({ error }) => (told = error),
  });
  await stream.consumeStream();
  assert.equal(told.statusCode, 404);
});

test('an abort signal, and leaving a stream', async () => {
  const controller = new AbortController();
  const endless = {
    ...greedy,
    prompt: 'Tell a very long story.',
    maxOutputTokens: 4000,
    providerOptions: { trioserve: { ignore_eos: true } },
  };
  const stream = streamText({ ...endless, abortSignal: controller.signal });
  for await (const _ of stream.textStream) controller.abort();
  await idle();
  const whole = generateText({ ...endless, abortSignal: AbortSignal.timeout(500) });
  await assert.rejects(whole, { name: 'TimeoutError' });
  await idle();
});
