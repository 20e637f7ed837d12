"""`wrap`: OpenAI's client with `feedback`.

    client = wrap(OpenAI(base_url="http://127.0.0.1:8700/v1", api_key="sk-attune-…"))
    reply = client.chat.completions.create(model="assistant", messages=messages, stream=True)
    ...
    client.feedback.up(reply)

OpenAI's objects keep what feedback needs: a completion, a chunk and a response have the id, a stream has the headers.
"""

from typing import TYPE_CHECKING, Any, cast, overload

from attune_client.client import AsyncAttune, Attune
from attune_client.feedback import AsyncFeedback, Feedback

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    class AttuneOpenAI(OpenAI):
        """OpenAI's client with `feedback`."""

        feedback: Feedback

    class AsyncAttuneOpenAI(AsyncOpenAI):
        """OpenAI's asynchronous client with `feedback`."""

        feedback: AsyncFeedback


@overload
def wrap(client: "OpenAI") -> "AttuneOpenAI": ...
@overload
def wrap(client: "AsyncOpenAI") -> "AsyncAttuneOpenAI": ...
def wrap(client: "OpenAI | AsyncOpenAI") -> Any:
    """Return the same client with an attribute `feedback`, for the same service and key.

    Replies of every method, streamed or not, are accepted by `feedback`.
    """
    import openai

    def api_key() -> str:
        return client.api_key  # read for each request, since an OpenAI client may change its key

    url = str(client.base_url)
    if isinstance(client, openai.AsyncOpenAI):
        cast(Any, client).feedback = AsyncAttune(url, api_key).feedback
    else:
        cast(Any, client).feedback = Attune(url, api_key).feedback
    return client
