"""The text of a result: cut to a size, with a mark, and without what a database or a tokenizer refuses."""


def cut_text(text: str, max_bytes: int) -> str:
    """Return the text in at most `max_bytes` of UTF-8: its head and its tail, and between them how much was cut.

    NUL and lone surrogates, which neither UTF-8 nor PostgreSQL takes, become "\\ufffd".

    Example: cut_text("a" * 50 + "b" * 50, 40) is "aaaaaaaa\\n[… 85 bytes cut …]\\nbbbbbbb"
    """
    data = text.replace("\x00", "\ufffd").encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
    if len(data) <= max_bytes:
        return data.decode()
    room = max(0, max_bytes - len(_mark(len(data)).encode()))
    tail_size = room // 2
    head = data[: room - tail_size].decode("utf-8", "ignore")
    tail = data[len(data) - tail_size :].decode("utf-8", "ignore")
    return head + _mark(len(data) - len(head.encode()) - len(tail.encode())) + tail


def _mark(num_bytes: int) -> str:
    return f"\n[… {num_bytes} bytes cut …]\n"
