"""The error tree and its one mapping."""

from __future__ import annotations

import msgspec
import pytest

from fourhop.wire import errors
from fourhop.wire.generate import GenerateRequest


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.ClientError("m"), 400),
        (errors.Unauthorized("m"), 401),
        (errors.NotFound("m"), 404),
        (errors.PayloadTooLarge("m"), 413),
        (errors.EngineError("m"), 500),
        (errors.TransferError("epoch", "m"), 500),
        (errors.PeerError("m"), 502),
        (errors.Unavailable("m"), 503),
        (errors.PeerTimeout("m"), 504),
    ],
)
def test_every_error_has_openai_s_shape(error: errors.FourhopError, status: int) -> None:
    body = msgspec.to_builtins(errors.error_response(error))
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == error.status == status


@pytest.mark.parametrize(("seconds", "header"), [(None, None), (0.2, "1"), (7.4, "7")])
def test_retry_after_is_whole_seconds(seconds: float | None, header: str | None) -> None:
    error = errors.Unavailable("busy", retry_after_s=seconds)
    assert errors.error_headers(error).get("Retry-After") == header


def test_a_peer_s_refusal_is_passed_on() -> None:
    sent = errors.error_response(errors.ClientError("too long", param="token_ids"))
    error = errors.error_from_body(400, msgspec.json.encode(sent))
    assert (error.status, error.message, error.param) == (400, "too long", "token_ids")


def test_a_peer_s_page_is_not_echoed() -> None:
    error = errors.error_from_body(502, b"<html>secret stack trace</html>")
    assert (error.status, error.message) == (502, "the upstream server answered with status 502")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"token_ids": ["x"], "sampling_params": {}}', "token_ids[0]"),
        (b'{"token_ids": [1], "sampling_params": {"top_p": "high"}}', "sampling_params.top_p"),
        (b'{"token_ids": [1]}', "sampling_params"),
        (
            b'{"token_ids": [1], "sampling_params": {}, "stream_options": {"include_usage": 1}}',
            "stream_options.include_usage",
        ),
        (b"[]", None),
    ],
)
def test_a_validation_error_names_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(body, type=GenerateRequest)
    assert errors.client_error(caught.value).param == param
