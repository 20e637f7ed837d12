"""What headers add to a chat request whose sender cannot set its body: its end user, and metadata.

Front ends and gateways let people set headers, and remove `metadata` and `user` from the body (Open WebUI, LiteLLM) or
have no way to set them (LibreChat, AnythingLLM). What the body says wins. Values may be percent-encoded.
"""

from collections.abc import Iterator, Mapping
from urllib.parse import unquote

from app.chat.schemas import MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE, MAX_USER, ChatRequest
from app.core.errors import BadRequest

USER_HEADER = "x-attune-user"
METADATA_PREFIX = "x-attune-metadata-"


def add_identity(request: ChatRequest, headers: Mapping[str, str]) -> ChatRequest:
    """Return the request with the end user and the metadata of its headers.

    An empty value, or a template that the front end did not fill in (`{{MESSAGE_ID}}`), is no value.
    Raises BadRequest, which names the header, beyond the limits that hold in the body.
    """
    update: dict[str, object] = {}
    user = _read(headers.get(USER_HEADER, ""), USER_HEADER, MAX_USER)
    if user and request.end_user is None:
        update["user"] = user
    added = {key: value for key, value in _read_metadata(headers) if key not in request.metadata}
    if added:
        metadata = {**request.metadata, **added}
        if len(metadata) > MAX_METADATA:
            raise BadRequest(
                f"The body's metadata and the headers {METADATA_PREFIX}* have {len(metadata)} pairs together; "
                f"there may be at most {MAX_METADATA}.",
                param="metadata",
            )
        update["metadata"] = metadata
    return request.model_copy(update=update) if update else request


def _read_metadata(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of the headers, with keys in lower case. Raises BadRequest for what cannot be stored."""
    for header in headers:
        name = header.lower()
        key = name.removeprefix(METADATA_PREFIX)
        if key == name or not (value := _read(headers[header], name, MAX_METADATA_VALUE)):
            continue
        if not 0 < len(key) <= MAX_METADATA_KEY:
            raise BadRequest(f"A key of metadata has 1 to {MAX_METADATA_KEY} characters.", param=name)
        yield key, value


def _read(encoded: str, header: str, max_chars: int) -> str:
    """Return the value as it was before it was percent-encoded, "" for none. Raises BadRequest if it is too long."""
    value = unquote(encoded).strip()
    if value.startswith("{{") and value.endswith("}}"):
        return ""
    if len(value) > max_chars:
        raise BadRequest(f"The value has {len(value)} characters; there may be at most {max_chars}.", param=header)
    if "\x00" in value:
        raise BadRequest("The value must not contain a NUL character.", param=header)
    return value
