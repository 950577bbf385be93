"""Reading one answer: bytes, cut anywhere, become the times and numbers of a record. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from fourhop.bench.record import Source
from fourhop.wire import sse


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """An event of any of the protocols: plain completions have `text`, chat `delta`, the token endpoint `token_ids`."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


class Reading:
    """One answer as it arrives. Feed every read with the time of its arrival, then `close`.

    `failure` is why the answer is no success, once it is known; the first reason counts.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self.chunk_at_s = array("d")
        self.last_at_s: float | None = None
        self.usage: _Usage | None = None
        self.ids: list[int] = []
        self._decoder = sse.SSEDecoder()
        self._num_ids = array("L")
        self._texts: list[str] = []
        self._finish: str | None = None
        self._finish_is_bare = False
        self._is_done = False

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def num_cached(self) -> int | None:
        """Prompt tokens that the server says it had in its cache."""
        details = None if self.usage is None else self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens

    def feed(self, data: bytes, at_s: float) -> None:
        """`at_s` is the time stamp of every event that these bytes complete."""
        for event in self._decoder.feed(data):
            if event == sse.DONE:
                self._is_done = True
            elif not self._is_done:
                self._take(event, at_s)

    def close(self, at_s: float) -> None:
        """The answer is over. A last event that lacks only its blank line counts."""
        self.feed(b"\n\n", at_s)
        if self._finish is None and not self._is_done:
            self.fail("the stream ended early")
        if not self.chunk_at_s:
            self.fail("no output")

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def said(self, estimate: Callable[[str], int]) -> dict[Source, int]:
        """The numbers of output tokens, by source, the best first."""
        said: dict[Source, int] = {}
        if self.ids:
            said["ids"] = len(self.ids)
        if self.usage is not None and self.usage.completion_tokens:
            said["usage"] = self.usage.completion_tokens
        if not said:
            said["estimate"] = max(estimate(self.text), 1 if self.chunk_at_s else 0)
        return said

    def place_tokens(self, num_output: int, source: Source) -> array[int] | None:
        """How many tokens each of `chunk_at_s` carried, None if it is not known.

        Known from ids; else if usage tells as many tokens as there are events; or one more, and a bare finish because
        of a stop token, which then is that token's event and is added.
        """
        if self.ids and all(self._num_ids):
            return self._num_ids
        if source == "estimate":
            return None
        if num_output == len(self.chunk_at_s) + 1 and self._finish == "stop" and self._finish_is_bare:
            assert self.last_at_s is not None
            self.chunk_at_s.append(self.last_at_s)
        return array("L", [1]) * num_output if num_output == len(self.chunk_at_s) else None

    def _take(self, data: bytes, at_s: float) -> None:
        try:
            event = msgspec.json.decode(data, type=_Event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.fail(f"an event that is no chunk: {error}")
            return
        if event.error is not None or event.object == "error":
            self.fail(f"an error inside the stream: {_message(event)}")
            return
        self.usage = event.usage or self.usage
        for choice in event.choices or ():
            self._note(choice, at_s)

    def _note(self, choice: _Choice, at_s: float) -> None:
        self.last_at_s = at_s
        text, ids = _text(choice), choice.token_ids or []
        is_output = bool(text or ids or (choice.delta is not None and _has_call(choice.delta)))
        if is_output:
            self.chunk_at_s.append(at_s)
            self._num_ids.append(len(ids))
            self.ids += ids
            self._texts.append(text)
        if choice.finish_reason is not None:
            self._finish, self._finish_is_bare = choice.finish_reason, not is_output


def _text(choice: _Choice) -> str:
    delta = choice.delta or _Delta()
    thinking = delta.reasoning or delta.reasoning_content or ""
    return (choice.text or "") + thinking + (delta.content or "") + (delta.refusal or "")


def _has_call(delta: _Delta) -> bool:
    return bool(delta.tool_calls or delta.function_call)


def _message(event: _Event) -> str:
    error = event.error if event.error is not None else event.message
    return str(error.get("message", error) if isinstance(error, dict) else error)
