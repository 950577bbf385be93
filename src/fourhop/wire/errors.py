"""Every error that a request can end with, and its one mapping to HTTP.

    FourhopError
    ├── ClientError            400  the request is wrong; `param` names the field's path
    │   ├── Unauthorized       401
    │   ├── Forbidden          403  a known client, or any, may not do this here
    │   ├── NotFound           404  unknown model or path
    │   ├── PayloadTooLarge    413
    │   └── TooManyRequests    429  a key's own limits; carries Retry-After
    ├── Unavailable            503  we cannot serve now: overloaded, draining, nothing alive; may carry Retry-After
    ├── EngineError            500  our own fault
    └── PeerError              502  another process failed us
        ├── PeerTimeout        504
        ├── PeerRefused        its own 4xx/429/503 status and message, passed on
        │   └── KeyRefused     502  it does not take the key that this server has for it: no fault of the client's
        ├── TransferError      500  KV could not be pulled or did not verify
        └── EnginesDisagree    502  two engines made different tokens of one request; neither is sent on

Catch broad (`FourhopError`) to answer, narrow (`TransferError`) to recover. `StartError` stands apart: a process
cannot start, and the command line prints its message as one line.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

import msgspec

MISSING = "Object missing required field `"
"""How msgspec says it."""


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorBody


class StartError(Exception):
    """A process cannot start: a port in use, a model that is not there, a setting that cannot be met."""


class FourhopError(Exception):
    """Root of the tree. `param` is the path of the offending field, `retry_after_s` an honest hint."""

    status = 500
    type = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class ClientError(FourhopError):
    status = 400
    type = "BadRequestError"


class Unauthorized(ClientError):
    status = 401
    type = "AuthenticationError"


class Forbidden(ClientError):
    status = 403
    type = "PermissionDeniedError"


class NotFound(ClientError):
    status = 404
    type = "NotFoundError"


class PayloadTooLarge(ClientError):
    status = 413
    type = "PayloadTooLargeError"


class TooManyRequests(ClientError):
    status = 429
    type = "RateLimitError"


class Unavailable(FourhopError):
    status = 503
    type = "ServiceUnavailableError"


class EngineError(FourhopError):
    """Ours: a bug, or an engine that stopped. The message is for the client; details belong in the log."""


class PeerError(FourhopError):
    status = 502
    type = "BadGatewayError"


class PeerTimeout(PeerError):
    status = 504
    type = "GatewayTimeoutError"


class PeerRefused(PeerError):
    """A peer answered with an error of its own; its status, type, message and param are passed on."""

    def __init__(self, status: int, body: ErrorBody, *, retry_after_s: float | None = None) -> None:
        super().__init__(body.message, param=body.param, retry_after_s=retry_after_s)
        self.status = status
        self.type = body.type


class KeyRefused(PeerRefused):
    """A peer wants another key than the one that this server has for it. `told` is its status."""

    def __init__(self, url: str, told: int) -> None:
        message = f"{url} does not take the key of the server that calls it (status {told}): see --upstream-api-key"
        super().__init__(PeerError.status, ErrorBody(message, PeerError.type, None, PeerError.status))
        self.url = url


class TransferError(PeerError):
    """KV was not pulled, or what was pulled does not verify. `cause` is a short word for a metric label."""

    status = 500
    type = "TransferError"

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(f"KV transfer failed ({cause}): {message}")
        self.cause = cause


class EnginesDisagree(PeerError):
    """Two engines of a fleet, which must make the same tokens of the same request, did not."""

    type = "EnginesDisagreeError"


def error_response(error: FourhopError) -> ErrorResponse:
    """The body for an error, in OpenAI's shape."""
    return ErrorResponse(ErrorBody(error.message, error.type, error.param, error.status))


def error_headers(error: FourhopError) -> dict[str, str]:
    """Headers that belong to the error: Retry-After in whole seconds, at least one."""
    if error.retry_after_s is None:
        return {}
    return {"Retry-After": str(max(1, round(error.retry_after_s)))}


class _Told(msgspec.Struct):
    """What a peer says of an error: OpenAI's object, of which some leave parts out. Its `code` is not read."""

    message: str
    type: str | None = None
    param: str | None = None


class _Enveloped(msgspec.Struct):
    error: _Told


class _Flat(_Told, kw_only=True):
    """The same without an envelope, as vLLM once wrote it and others still do."""

    object: Literal["error"]


def error_from_body(status: int, body: bytes, *, retry_after_s: float | None = None) -> PeerRefused:
    """A peer's error response as an exception; a body that is not of OpenAI's shape is not echoed."""
    told = _told(body, status)
    detail = ErrorBody(told.message, told.type or "RefusedError", told.param, status)
    return PeerRefused(status, detail, retry_after_s=retry_after_s)


def _told(body: bytes, status: int) -> _Told:
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(body, type=_Enveloped).error
    with suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(body, type=_Flat)
    return _Told(f"the upstream server answered with status {status}", "UpstreamError")


def client_error(error: msgspec.ValidationError, prefix: str = "") -> ClientError:
    """A msgspec validation error as a 400 whose `param` is the field's path.

    msgspec ends its messages with "- at `$.a[0].b`"; that path, without `$.`, is the param. Where a field is missing
    it is the path that the field would have.
    """
    text, _, path = str(error).partition(" - at `")
    param = path.rstrip("`").removeprefix("key in ").removeprefix("$").lstrip(".")
    if text.startswith(MISSING):
        param = f"{param}.{text.removeprefix(MISSING).rstrip('`')}".lstrip(".")
    joint = "" if param.startswith("[") else "."
    full = f"{prefix}{joint}{param}".strip(".") if prefix else param
    return ClientError(text, param=full or None)
