// OpenAI's SDK for Node. What is compared between routes is no near tie for the default model.

const assert = require("node:assert/strict");
const OpenAI = require("openai");

const asked = JSON.parse(process.argv[2]);
const model = asked.model;
const client = new OpenAI({
  baseURL: `${asked.base_url}/v1`,
  apiKey: "none",
  maxRetries: 0,
  defaultHeaders: { "x-pdserve-mode": asked.mode },
});
const messages = [{ role: "user", content: "How many days are in a week?" }];
const greedy = { model, temperature: 0, max_tokens: 12 };
const answers = [];

async function byRoute(request) {
  const { data, response } = await request.withResponse();
  assert.equal(response.headers.get("x-pdserve-mode"), asked.mode);
  return data;
}

async function chunksOf(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

async function chats() {
  const whole = await byRoute(client.chat.completions.create({ ...greedy, messages }));
  const { content } = whole.choices[0].message;
  assert.ok(content);
  assert.equal(
    whole.usage.total_tokens,
    whole.usage.prompt_tokens + whole.usage.completion_tokens,
  );
  const stream = await byRoute(
    client.chat.completions.create({
      ...greedy,
      messages,
      stream: true,
      stream_options: { include_usage: true },
    }),
  );
  const chunks = await chunksOf(stream);
  const deltas = chunks.flatMap((chunk) => chunk.choices.map((choice) => choice.delta));
  assert.equal(deltas[0].role, "assistant");
  assert.equal(deltas.map((delta) => delta.content ?? "").join(""), content);
  assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
  answers.push(content, whole.choices[0].finish_reason, whole.usage.prompt_tokens);
}

async function helpers() {
  const runner = client.chat.completions.stream({ ...greedy, messages });
  const events = [];
  runner.on("content", (delta) => events.push(delta));
  const final = await runner.finalChatCompletion();
  assert.equal(events.join(""), final.choices[0].message.content);
  assert.equal(final.choices[0].message.content, answers[0]);
}

async function completions() {
  const prompt = ["1, 2, 3, 4,", "10, 9, 8, 7,"];
  const whole = await byRoute(client.completions.create({ ...greedy, prompt, logprobs: 2 }));
  const texts = whole.choices.map((choice) => choice.text);
  assert.deepEqual(
    whole.choices.map((choice) => choice.logprobs.tokens.join("")),
    texts,
  );
  const stream = await byRoute(
    client.completions.create({ ...greedy, prompt: prompt[0], stream: true }),
  );
  const pieces = (await chunksOf(stream)).flatMap((chunk) => chunk.choices);
  assert.equal(pieces.map((choice) => choice.text).join(""), texts[0]);
  answers.push(texts);
}

async function logprobs() {
  const whole = await byRoute(
    client.chat.completions.create({ ...greedy, messages, logprobs: true, top_logprobs: 2 }),
  );
  const { content } = whole.choices[0].logprobs;
  assert.equal(content.length, whole.usage.completion_tokens);
  assert.ok(content.every((one) => one.logprob <= 0 && one.top_logprobs.length === 2));
}

async function responses() {
  const request = { model, input: messages[0].content, temperature: 0, max_output_tokens: 12 };
  const whole = await byRoute(client.responses.create(request));
  assert.equal(whole.output_text, answers[0]);
  const events = await chunksOf(await byRoute(client.responses.create({ ...request, stream: true })));
  const text = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(text.map((event) => event.delta).join(""), answers[0]);
}

async function leaving() {
  const endless = { ...greedy, max_tokens: 4000, messages, stream: true };
  const stream = await client.chat.completions.create(endless);
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  assert.ok(stream.controller.signal.aborted);
}

async function refusals() {
  const tools = [{ type: "function", function: { name: "weather", parameters: {} } }];
  const create = (fields) =>
    client.chat.completions.create({ ...greedy, messages, ...fields });
  await assert.rejects(create({ tools }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.deepEqual([error.code, error.param], ["invalid_argument", "tool_choice"]);
    assert.ok(error.requestID);
    return true;
  });
  await assert.rejects(create({ temperature: -1, stream: true }), OpenAI.BadRequestError);
  await assert.rejects(create({ model: "no-such-model" }), OpenAI.NotFoundError);
  const embedding = client.embeddings.create({ model, input: "Hi" });
  await assert.rejects(embedding, OpenAI.NotFoundError);
}

async function models() {
  assert.deepEqual((await client.models.list()).data.map((one) => one.id), [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
}

async function main() {
  const checks = [
    chats,
    helpers,
    completions,
    logprobs,
    responses,
    leaving,
    refusals,
    models,
  ];
  for (const check of checks) await check();
  const versions = `openai ${require("openai/version").VERSION}, Node ${process.versions.node}`;
  console.log(JSON.stringify({ answers, versions }));
}

main();
