"""The head and the tail of an output stream, in bounded memory."""


class BoundedOutput:
    """Takes any number of bytes, and holds at most the first and the last `max_bytes` / 2 of them."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._size = 0

    def write(self, data: bytes) -> None:
        self._size += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._half:  # not at each write, which would copy the tail for each byte
            del self._tail[: -self._half]

    def text(self) -> str:
        """Return the output, with a mark where something was cut."""
        tail = self._tail[-self._half :]
        num_cut = self._size - len(self._head) - len(tail)
        if num_cut == 0:
            return (self._head + tail).decode("utf-8", "replace")
        head = self._head.decode("utf-8", "ignore")
        return f"{head}\n[… {num_cut} bytes cut …]\n{tail.decode('utf-8', 'ignore')}"
