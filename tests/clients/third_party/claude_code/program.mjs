// Claude Code without a terminal: a text, then a loop in which it runs a command. Prints what it reports as JSON.

import { execFile } from "node:child_process";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

const folder = dirname(fileURLToPath(import.meta.url));
const claude = join(folder, "node_modules", "@anthropic-ai", "claude-code", "cli-wrapper.cjs");
const env = {
  PATH: process.env.PATH,
  HOME: process.env.HOME,
  ANTHROPIC_BASE_URL: process.env.ATTUNE_TEST_BASE_URL.replace(/\/v1$/, ""),
  ANTHROPIC_API_KEY: process.env.ATTUNE_TEST_API_KEY,
  ANTHROPIC_MODEL: "shop",
  ANTHROPIC_CUSTOM_HEADERS: "x-app-note: tests",
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
};

async function run(prompt, ...options) {
  const args = [claude, "-p", prompt, "--output-format", "json", "--system-prompt", "Be brief.", ...options];
  const running = promisify(execFile)(process.execPath, args, { env, timeout: 120_000 });
  running.child.stdin.end();
  const { stdout } = await running;
  return JSON.parse(stdout);
}

const text = await run("When are you open?", "--tools", "");
const loop = await run("How much is 40 and 2?", "--tools", "Bash", "--allowedTools", "Bash");
console.log(JSON.stringify({ text, loop }));
