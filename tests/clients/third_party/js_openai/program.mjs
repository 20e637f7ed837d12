// The `openai` package for JavaScript, chat completions.

import OpenAI from "openai";
import {
  API_KEY,
  BASE_URL,
  MAX_TOKENS,
  MODEL,
  OPENING_SCHEMA,
  ORDER_PARAMETERS,
  ORDER_QUESTION,
  QUESTION,
  TEMPERATURE,
  continueChat,
  messages,
  report,
} from "../client_program.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: API_KEY });
const sampling = { model: MODEL, temperature: TEMPERATURE, max_tokens: MAX_TOKENS };

async function chat() {
  const reply = await client.chat.completions.create({ messages: messages(QUESTION), ...sampling });
  return { id: reply.id, text: reply.choices[0].message.content };
}

async function stream() {
  const chunks = await client.chat.completions.create({ messages: messages(QUESTION), stream: true, ...sampling });
  let id = null;
  const texts = [];
  for await (const chunk of chunks) {
    id = chunk.id;
    if (chunk.choices[0]?.delta.content) texts.push(chunk.choices[0].delta.content);
  }
  return { id, text: texts.join(""), pieces: texts.length };
}

async function tools() {
  const tool = { type: "function", function: { name: "order_status", parameters: ORDER_PARAMETERS } };
  const choice = { type: "function", function: { name: "order_status" } };
  const request = { messages: messages(ORDER_QUESTION), tools: [tool], tool_choice: choice, ...sampling };
  const reply = await client.chat.completions.create(request);
  const [call] = reply.choices[0].message.tool_calls;
  return { id: reply.id, tool: { name: call.function.name, arguments: JSON.parse(call.function.arguments) } };
}

async function structured() {
  const format = { type: "json_schema", json_schema: { name: "opening", strict: true, schema: OPENING_SCHEMA } };
  const request = { messages: messages(QUESTION), response_format: format, ...sampling };
  const reply = await client.chat.completions.parse(request);
  return { id: reply.id, value: reply.choices[0].message.parsed };
}

async function multiTurn() {
  const first = await chat();
  const reply = await client.chat.completions.create({ messages: continueChat(first.text), ...sampling });
  return { id: reply.id, text: reply.choices[0].message.content, first_text: first.text };
}

await report({ chat, stream, tools, structured, multi_turn: multiTurn });
