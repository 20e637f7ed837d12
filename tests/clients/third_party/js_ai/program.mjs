// The AI SDK with its OpenAI-compatible provider. `response.id` is the completion's id.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, jsonSchema, streamText, tool } from "ai";
import {
  API_KEY,
  BASE_URL,
  MAX_TOKENS,
  MODEL,
  NEXT_QUESTION,
  OPENING_SCHEMA,
  ORDER_PARAMETERS,
  ORDER_QUESTION,
  QUESTION,
  SYSTEM,
  TEMPERATURE,
  report,
} from "../client_program.mjs";

const provider = createOpenAICompatible({
  name: "attune",
  baseURL: BASE_URL,
  apiKey: API_KEY,
  supportsStructuredOutputs: true,
});
const options = {
  model: provider(MODEL),
  instructions: SYSTEM,
  temperature: TEMPERATURE,
  maxOutputTokens: MAX_TOKENS,
  maxRetries: 0,
};

async function chat() {
  const reply = await generateText({ ...options, prompt: QUESTION });
  return { id: reply.response.id, text: reply.text };
}

async function stream() {
  const reply = streamText({ ...options, prompt: QUESTION });
  const texts = [];
  for await (const text of reply.textStream) texts.push(text);
  return { id: (await reply.response).id, text: texts.join(""), pieces: texts.length };
}

async function tools() {
  const orderStatus = tool({ inputSchema: jsonSchema(ORDER_PARAMETERS), execute: async () => "shipped" });
  const choice = { type: "tool", toolName: "order_status" };
  const request = { ...options, prompt: ORDER_QUESTION, tools: { order_status: orderStatus }, toolChoice: choice };
  const reply = await generateText(request);
  const [call] = reply.toolCalls;
  return { id: reply.response.id, tool: { name: call.toolName, arguments: call.input } };
}

async function structured() {
  const output = Output.object({ schema: jsonSchema(OPENING_SCHEMA) });
  const reply = await generateText({ ...options, prompt: QUESTION, output });
  return { id: reply.response.id, value: reply.output };
}

async function multiTurn() {
  const question = { role: "user", content: QUESTION };
  const first = await generateText({ ...options, messages: [question] });
  const next = [question, ...first.response.messages, { role: "user", content: NEXT_QUESTION }];
  const reply = await generateText({ ...options, messages: next });
  return { id: reply.response.id, text: reply.text, first_text: first.text };
}

await report({ chat, stream, tools, structured, multi_turn: multiTurn });
