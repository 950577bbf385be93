"""Reading a request: its id and its JSON body, with every failure a ClientError."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from fourhop.service.surrogates import lone_surrogate_path
from fourhop.wire.errors import ClientError, PayloadTooLarge, client_error
from fourhop.wire.trace import HEADER, parse_traceparent

T = TypeVar("T")

MAX_REQUEST_ID_CHARS = 128

TRACEPARENT = HEADER.encode()


def header(scope: Scope, name: bytes, default: str = "") -> str:
    """The first header of this name, which is in lower case. Starlette's way makes an object first."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return default


def request_id(request: Request) -> str:
    """The client's `X-Request-Id`, cut to 128 printable ASCII characters without spaces; "" if there is none."""
    return client_request_id(request.scope)


def client_request_id(scope: Scope) -> str:
    raw = header(scope, b"x-request-id")
    return "".join(character for character in raw if "!" <= character <= "~")[:MAX_REQUEST_ID_CHARS]


def traceparent(request: Request) -> str | None:
    """The client's `traceparent`, if it is valid."""
    value = header(request.scope, TRACEPARENT)
    return None if parse_traceparent(value) is None else value


async def read_body(request: Request, type: type[T]) -> T:
    """The JSON body as a value of `type`. Raises ClientError; for a wrong field `param` is its path."""
    media_type = header(request.scope, b"content-type").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ClientError(f"Content-Type must be application/json, not {media_type or 'missing'}")
    if header(request.scope, b"content-encoding", "identity").lower() != "identity":
        raise ClientError("a compressed body is not accepted")
    body = await _read_bytes(request, request.app.state.server_config.max_body_bytes)
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise client_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (path := lone_surrogate_path(body)) is not None:
            raise ClientError(f"{path}: half of a surrogate pair is not a character", param=path or None) from None
        raise ClientError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise ClientError("the body is nested too deeply") from None


async def _read_bytes(request: Request, limit: int) -> bytes:
    declared = header(request.scope, b"content-length")
    if declared.isdecimal() and int(declared) > limit:
        raise PayloadTooLarge(f"the body has {declared} bytes, the limit is {limit}")
    pieces, num_bytes, is_whole = [], 0, False
    while not is_whole:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > limit:
            raise PayloadTooLarge(f"the body is larger than the limit of {limit} bytes")
        pieces.append(piece)
        is_whole = not message.get("more_body", False)
    return b"".join(pieces)
