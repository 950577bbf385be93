"""`POST /v1/chat/completions/derender/batch`: chunks of many streams in one call. No HTTP, no clock."""

from __future__ import annotations

import msgspec

from fourhop.frontend.derender_endpoints import derender_chat
from fourhop.frontend.names import rename
from fourhop.frontend.served import Served
from fourhop.wire.derender import (
    ChatDerenderBatch,
    ChatDerenderBatchAnswer,
    ChatDerenderChunk,
    ChatDerenderProgress,
    ChatDerenderRequest,
    ChatDerenderStream,
)
from fourhop.wire.errors import ClientError, error_response
from fourhop.wire.openai_chat import ChatCompletionChunk


def derender_batch(body: ChatDerenderBatch, served: Served, *, created: int) -> ChatDerenderBatchAnswer:
    """Every stream as if its chunks had been sent one by one. `created` is Unix time.

    What is wrong with one stream is told in its entry, under its path in the body.
    """
    return ChatDerenderBatchAnswer(
        [_progress(stream, f"streams[{number}]", served, created) for number, stream in enumerate(body.streams)]
    )


def _progress(stream: ChatDerenderStream, path: str, served: Served, created: int) -> ChatDerenderProgress:
    chunks: list[ChatCompletionChunk] = []
    request = ChatDerenderRequest(
        stream=True,
        model=stream.model,
        stream_state=stream.stream_state,
        prompt_tokens=stream.prompt_tokens,
        prompt_token_ids=stream.prompt_token_ids,
        chat_request=stream.chat_request,
    )
    state = None
    for number, chunk in enumerate(stream.generate_chunks):
        try:
            answer = derender_chat(msgspec.structs.replace(request, generate_chunk=chunk), served, created=created)
        except ClientError as error:
            rename(error, {"generate_chunk": f"generate_chunks[{number}]"})
            error.param = f"{path}.{error.param}" if error.param else path
            return ChatDerenderProgress(chunks=chunks, stream_state=state, error=error_response(error).error)
        assert isinstance(answer, ChatDerenderChunk)
        chunks.append(answer.chunk)
        state = answer.stream_state
        request = msgspec.structs.replace(request, stream_state=msgspec.Raw(msgspec.json.encode(state)))
    return ChatDerenderProgress(chunks=chunks, stream_state=state)
