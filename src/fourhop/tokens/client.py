"""`RemoteTokenServer`: an engine, a router or a stock vLLM at the other end of a connection."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import msgspec

from fourhop.tokens.connection import Answer, Session, Timeouts, call, request_headers
from fourhop.tokens.dialect import GENERATE, Dialect, ErrorEvent, Event
from fourhop.tokens.limits import PARAMS
from fourhop.tokens.refusal import Entry
from fourhop.wire import sse
from fourhop.wire.errors import ErrorBody, PeerError, PeerRefused
from fourhop.wire.generate import GenerateChunk, GenerateRequest, StreamOptions
from fourhop.wire.trace import HEADER

STREAM_END_S = 2.0
"""How long the peer may take to end its answer after `[DONE]`; later than that costs only the connection."""


class RemoteTokenServer:
    """A TokenServer over HTTP. It always streams, whatever the request says, and keeps the request's own id.

    Closing the iterator closes the connection, which aborts the request at the peer. `session` comes from
    `open_session`; the caller closes it. Works with vLLM 0.32: moments and tickets are then simply absent.
    """

    def __init__(
        self,
        url: str,
        session: Session,
        *,
        timeouts: Timeouts | None = None,
        api_key: str | None = None,
        dialect: Dialect = GENERATE,
        entry: Entry | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._entry = entry or Entry(self.url)
        self._dialect = dialect
        self._session = session
        self._timeouts = timeouts or Timeouts()
        self._headers = request_headers(api_key) | {"Accept": sse.CONTENT_TYPE}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        """Raises PeerRefused, PeerTimeout or PeerError, also for a stream that ends before it is complete."""
        asked = msgspec.structs.replace(
            request, stream=True, stream_options=StreamOptions(include_usage=True), traceparent=None
        )
        async with call(
            self._session,
            "POST",
            self.url + self._dialect.path,
            timeouts=self._timeouts,
            body=self._dialect.encode(asked),
            headers=self._headers | own_headers(request),
            entry=self._entry,
        ) as answer:
            if answer.content_type != sse.CONTENT_TYPE:
                raise PeerError(f"{self.url} answered with {answer.content_type or 'no type'}, not with a stream")
            decoder, missing = sse.SSEDecoder(), _Missing(request)
            patience_s = self._timeouts.first_byte_s  # for the first token too: a ticket may come long before it
            while data := await answer.read(patience_s):
                events = decoder.feed(data)
                is_done = bool(events) and events[-1] == sse.DONE
                told, failure = self._read(events[:-1] if is_done else events)
                for event in joined(told):
                    missing.note(event)
                    if event.choices:
                        patience_s = self._timeouts.idle_s
                    yield _chunk(event, request.request_id)
                if failure is not None:
                    raise failure
                if is_done:
                    missing.expect_nothing(self.url)
                    if not answer.is_complete:
                        await _read_end(answer)
                    return
            raise PeerError(f"{self.url} ended the stream {'early' if decoder.close() else 'inside an event'}")

    def _read(self, received: Sequence[bytes]) -> tuple[list[Event], PeerError | None]:
        """What arrived together, up to the first event that is an error or none at all, and that as an error."""
        try:
            events, broken = self._dialect.decode_all(received), None
        except (msgspec.DecodeError, UnicodeDecodeError):
            events, broken = self._read_singly(received)
        for number, event in enumerate(events):
            if event.error is not None:
                return events[:number], _refusal(event.error)
        return events, broken

    def _read_singly(self, received: Sequence[bytes]) -> tuple[list[Event], PeerError | None]:
        events: list[Event] = []
        for data in received:
            try:
                events.append(self._dialect.decode(data))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return events, PeerError(f"{self.url} sent an event that is not a chunk: {error}")
        return events, None


def id_header(request_id: str) -> dict[str, str]:
    """An id that is no header value travels in the body alone, where any text may stand."""
    is_value = request_id.isascii() and request_id.isprintable() and request_id
    return {"X-Request-Id": request_id} if is_value else {}


def own_headers(request: GenerateRequest) -> dict[str, str]:
    """What a request says in headers: its id, and which trace it belongs to."""
    headers = id_header(request.request_id)
    if request.traceparent is not None:
        headers[HEADER] = request.traceparent
    return headers


def _chunk(event: Event, request_id: str) -> GenerateChunk:
    return GenerateChunk(
        request_id=request_id,
        choices=event.choices,
        usage=event.usage,
        prompt_token_ids=event.prompt_token_ids,
        prompt_logprobs=event.prompt_logprobs,
        kv_transfer_params=event.kv_transfer_params,
        moments=event.moments,
    )


def joined(events: Sequence[Event]) -> list[Event]:
    """What arrived together, joined where a reader cannot tell: the tokens of one choice, and then its finish.

    A stream that bursts, or whose reader is slow, costs the less for it.
    """
    told: list[Event] = []
    for event in events:
        if not told or not _join(told[-1], event):
            told.append(event)
    return told


def _join(held: Event, event: Event) -> bool:
    """Add what `event` says to `held`, if the two say of one choice, without loss, what one event could say."""
    if len(held.choices) != 1 or len(event.choices) != 1:
        return False
    (before,), (after,) = held.choices, event.choices
    if (
        before.index != after.index
        or before.finish_reason is not None
        or (before.logprobs is None) != (after.logprobs is None)
        or held.usage is not None
        or event.usage is not None
        or held.kv_transfer_params is not None
        or event.prompt_token_ids is not None
        or event.prompt_logprobs is not None
    ):
        return False
    before.token_ids.extend(after.token_ids)  # its own list, just decoded
    if before.logprobs is not None and after.logprobs is not None:
        before.logprobs.content.extend(after.logprobs.content)
    if after.finish_reason is not None:
        held.choices = [msgspec.structs.replace(after, token_ids=before.token_ids, logprobs=before.logprobs)]
    held.kv_transfer_params = event.kv_transfer_params
    held.moments = event.moments or held.moments
    return True


async def _read_end(answer: Answer) -> None:
    """Read the end of a complete answer, so that its connection can be used again."""
    try:
        while await answer.read(STREAM_END_S):
            pass
    except PeerError:
        return


_NO_PROMPT_LOGPROBS = ErrorBody(
    f"{PARAMS}.prompt_logprobs: the engine gives no log-probabilities of the prompt in a stream",
    "BadRequestError",
    f"{PARAMS}.prompt_logprobs",
    400,
)


class _Missing:
    """What a stream still owes: what was asked of the prompt, the finish of each choice, and the usage of all."""

    def __init__(self, request: GenerateRequest) -> None:
        self._choices = set(range(request.sampling_params.n))
        self._usage = True
        self._prompt = request.sampling_params.prompt_logprobs is not None

    def note(self, event: Event) -> None:
        """Raises PeerRefused for a first token without what it comes with: a stock vLLM streams no such thing."""
        if self._prompt and event.choices:
            if event.prompt_logprobs is None:
                raise PeerRefused(400, _NO_PROMPT_LOGPROBS)
            self._prompt = False
        for choice in event.choices:
            if choice.finish_reason is not None:
                self._choices.discard(choice.index)
        if not event.choices and event.usage is not None:
            self._usage = False

    def expect_nothing(self, url: str) -> None:
        if self._choices:
            raise PeerError(f"{url} ended the stream without a finish reason")
        if self._usage:
            raise PeerError(f"{url} ended the stream without its usage")


def _refusal(error: ErrorEvent) -> PeerRefused:
    """An error inside a stream, with the status that it would have had before it."""
    status = error.code if isinstance(error.code, int) and 400 <= error.code <= 599 else 502
    return PeerRefused(status, ErrorBody(error.message, error.type or "UpstreamError", error.param, status))
