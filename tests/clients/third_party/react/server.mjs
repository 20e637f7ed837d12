// Serve the pages /chat and /assistant, and POST /api/chat by the route handler. on PORT. Prints a line when it is ready.
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import { Readable } from "node:stream";
import { POST } from "./dist/route.mjs";

const server = createServer(async (incoming, outgoing) => {
  if (incoming.method === "POST") {
    const body = Readable.toWeb(incoming);
    const answer = await POST(new Request(`http://127.0.0.1${incoming.url}`, { method: "POST", body, duplex: "half" }));
    outgoing.writeHead(answer.status, Object.fromEntries(answer.headers));
    Readable.fromWeb(answer.body).pipe(outgoing);
  } else if (incoming.url.endsWith(".js")) {
    outgoing.setHeader("content-type", "text/javascript");
    outgoing.end(readFileSync(`dist${incoming.url}`));
  } else {
    outgoing.setHeader("content-type", "text/html");
    outgoing.end(`<!doctype html><meta charset="utf-8"><body><script type="module" src="${incoming.url}.js"></script>`);
  }
});
server.listen(Number(process.env.PORT), "127.0.0.1", () => console.log("ready"));
