// What the JavaScript programs of this folder share; client_program.py describes the report.

export const BASE_URL = process.env.ATTUNE_TEST_BASE_URL;
export const API_KEY = process.env.ATTUNE_TEST_API_KEY;
export const MODEL = "shop";
export const TEMPERATURE = 0.3;
export const MAX_TOKENS = 120;
export const SYSTEM = "You are the support assistant of a small bicycle shop.";
export const QUESTION = "When are you open on Friday?";
export const NEXT_QUESTION = "And on Saturday?";
export const ORDER_QUESTION = "Where is my order 4321?";
export const ORDER_PARAMETERS = {
  type: "object",
  properties: { order_id: { type: "string", description: "The number of the order." } },
  required: ["order_id"],
};
export const OPENING_SCHEMA = {
  type: "object",
  properties: { day: { type: "string", enum: ["Friday", "Saturday"] }, open: { type: "boolean" } },
  required: ["day", "open"],
  additionalProperties: false,
};
const TRIES = 4;

export function messages(question) {
  return [
    { role: "system", content: SYSTEM },
    { role: "user", content: question },
  ];
}

export function continueChat(text) {
  return [...messages(QUESTION), { role: "assistant", content: text }, { role: "user", content: NEXT_QUESTION }];
}

/** Give feedback by what the client shows of a reply. Return its id. */
async function giveFeedback(completionId) {
  const response = await fetch(`${BASE_URL}/feedback`, {
    method: "POST",
    headers: { authorization: `Bearer ${API_KEY}`, "content-type": "application/json" },
    body: JSON.stringify({ completion_id: completionId, kind: "binary", value: "up", source: "ada" }),
  });
  if (response.status !== 201) {
    throw new Error(await response.text());
  }
  return (await response.json()).id;
}

export async function report(capabilities) {
  const results = {};
  for (const [name, run] of Object.entries(capabilities)) {
    for (let attempt = 0; attempt < TRIES; attempt++) {
      try {
        results[name] = await run();
        break;
      } catch (error) {
        results[name] = { error: String(error?.stack ?? error) };
      }
    }
  }
  for (const name of ["chat", "stream"]) {
    if (results[name].error === undefined) {
      results[name].feedback = await giveFeedback(results[name].id);
    }
  }
  process.stdout.write(JSON.stringify(results) + "\n");
}
