"""An MCP server over stdio, by hand: its tools are on two pages, and it answers nothing of the method it is given."""

import json
import sys


def answer(method: str, parameters: dict[str, object]) -> dict[str, object]:
    match method:
        case "initialize":
            version = parameters["protocolVersion"]
            server = {"name": "silent", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
        case "tools/list" if parameters.get("cursor") == "2":
            return {"tools": [{"name": "second", "inputSchema": {"type": "object"}}]}
        case "tools/list":
            return {"tools": [{"name": "first", "inputSchema": {"type": "object"}}], "nextCursor": "2"}
        case _:
            return {"content": [{"type": "text", "text": "done"}]}


for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request or request["method"] in sys.argv[1:]:
        continue
    reply: dict[str, object] = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] in ("initialize", "tools/list", "tools/call"):
        reply["result"] = answer(request["method"], request.get("params") or {})
    else:
        reply["error"] = {"code": -32601, "message": "no such method"}
    print(json.dumps(reply), flush=True)
