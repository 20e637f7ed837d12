"""Streamlit: thumbs, stars or faces under a reply.

with st.chat_message("assistant"):
    st.write(message["content"])
    feedback(client, message["id"])  # the completion id of the reply
"""

from typing import Any, Literal

from attune_client.votes import Receiver, receiver_of, send_vote, source_id

Options = Literal["thumbs", "stars", "faces"]


def feedback(
    client: Receiver,
    completion_id: str,
    key: str | None = None,
    *,
    options: Options = "thumbs",
    user: str | None = None,
) -> int | None:
    """Show `st.feedback` and send what is pressed. Another press replaces the vote; pressing it again takes it back.

    Args:
        client: Attune, its feedback or its queue; create it once, with `st.cache_resource`.
        completion_id: The id of the reply.
        key: The key of the widget, by default one for each reply.
        options: Thumbs, or five stars or faces, which are a rating from 1 to 5.
        user: Who votes: by default the person who logged in, or else the session of the browser.

    Returns:
        What `st.feedback` returns.
    """
    import streamlit as st

    key = key or f"attune-{completion_id}"
    receiver, source = receiver_of(client), source_id("streamlit", user or _current_user())

    def send() -> None:
        pressed: int | None = st.session_state[key]
        value: bool | int | None = None
        if pressed is not None:
            value = bool(pressed) if options == "thumbs" else pressed + 1
        send_vote(receiver, completion_id, value, key=f"{source}:{completion_id}", source=source)

    selected: int | None = st.feedback(options, key=key, on_change=send)
    return selected


def _current_user() -> str:
    import streamlit as st
    from streamlit.runtime.scriptrunner import get_script_run_ctx

    account: Any = st.user
    if account.get("is_logged_in"):
        return str(account.get("sub") or account.get("email"))
    context = get_script_run_ctx()
    return context.session_id if context is not None else "unknown"
