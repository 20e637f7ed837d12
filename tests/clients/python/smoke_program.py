"""Use every part of attune-client that needs httpx alone. Run by test_wheel.py, in an environment without Attune."""

import asyncio
import importlib.util
import sys
import tempfile
from pathlib import Path

import attune_client
from attune_client import AsyncAttune, Attune, NotFound, WebhookVerificationFailed, build, verify_webhook

MODEL = "shop"


def main() -> None:
    for name in ("app", "alignment", "workers", "openai", "langchain_core", "pydantic", "sqlalchemy"):
        assert importlib.util.find_spec(name) is None, f"{name} can be imported here"
    assert Path(attune_client.__file__).with_name("py.typed").exists()
    with Attune() as client:
        reply = client.chat.create("When are you open?", model=MODEL)
        client.feedback.up(reply, source="ada")
        with client.chat.stream("When are you open?", model=MODEL) as stream:
            assert "".join(stream) == reply.text
        client.feedback.rate(stream, 4, source="ada")
        results = client.feedback.batch([build.compare(reply, stream), build.comment(reply, "thanks")])
        assert [result["status"] for result in results] == [201, 201], results
        with client.queue(Path(tempfile.mkdtemp()) / "votes.db") as queue:
            queue.correct(reply, "We open at nine.")
            queue.flush(timeout=30)
        try:
            client.feedback.up("chatcmpl-unknown")
        except NotFound as error:
            assert error.request_id and error.code == "not_found"
        else:
            raise AssertionError("feedback on an unknown reply was accepted")
        assert client.policies.get(MODEL)["serving"] == f"{MODEL}@v0"
    try:
        verify_webhook("whsec_c2VjcmV0", b"{}", {})
    except WebhookVerificationFailed:
        pass
    else:
        raise AssertionError("a webhook without a signature was accepted")
    asyncio.run(use_asyncio())
    print(f"attune_client of {sys.prefix} works")


async def use_asyncio() -> None:
    async with AsyncAttune() as client:
        reply = await client.chat.create("Hello", model=MODEL)
        await client.feedback.down(reply)


if __name__ == "__main__":
    main()
