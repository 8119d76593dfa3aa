// The `openai` package of Node: a chat, a stream and an error.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.OUTRIDER_URL}/v1`, apiKey: "none", maxRetries: 0 });
const chat = {
  model: "demo",
  messages: [{ role: "user", content: "What is the capital of France?" }],
  max_tokens: 16,
  temperature: 0,
};

const whole = await client.chat.completions.create(chat);
const text = whole.choices[0].message.content;
assert.ok(text.length > 0);

let streamed = "";
const stream = await client.chat.completions.create({ ...chat, stream: true });
for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
assert.equal(streamed, text);

await assert.rejects(
  client.chat.completions.create({ ...chat, temperature: 9 }),
  (error) => error.status === 400 && error.param === "temperature",
);
