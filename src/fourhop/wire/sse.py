"""Server-sent events: one encoder and one incremental decoder for every stream we send or read.

Source: WHATWG HTML, section 9.2.6 "Interpreting an event stream".
"""

from __future__ import annotations

DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"
CONTENT_TYPE = "text/event-stream"


def encode_event(data: bytes, name: str = "") -> bytes:
    """One event, possibly named. `data` is a JSON document, so it holds no raw newline."""
    field = f"event: {name}\n".encode() if name else b""
    return field + b"data: " + data + b"\n\n"


class SSEDecoder:
    """Turns bytes, cut anywhere, into the data of whole events.

    Accepts LF, CRLF and CR line ends, comments, other fields, several data lines in an event and data without a
    space after the colon. An event that the stream's end cuts off is reported by `close`, never delivered as whole.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that this chunk completes."""
        if not self._buffer and not self._data and chunk.startswith(b"data: ") and chunk.endswith(b"\n\n"):
            events = chunk[6:-2].split(b"\n\ndata: ")  # as every server writes them
            data = b"".join(events)
            if b"\n" not in data and b"\r" not in data:
                return events
        buffer = self._buffer + chunk
        if b"\r" in buffer:
            # A CR at the very end may be half of a CRLF: it waits for the next byte.
            tail = b"\r" if buffer.endswith(b"\r") else b""
            body = buffer[: len(buffer) - len(tail)]
            buffer = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + tail
        *lines, self._buffer = buffer.split(b"\n")
        return [event for line in lines if (event := self._line(line)) is not None]

    def close(self) -> bool:
        """True if the stream ended between events, False if it was cut inside one."""
        return not self._data and not self._buffer.strip()

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            event, self._data = self._data, []
            return b"\n".join(event) if event else None
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value[1:] if value.startswith(b" ") else value)
        return None
