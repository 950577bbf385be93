from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fakes.derendering import PROMPT, TOOLS, context, encode, toy
from fakes.toy import EOS, THINK, VOCAB_SIZE
from fourhop.frontend.answers import Answer
from fourhop.frontend.derender import Derenderer
from fourhop.frontend.derender_checks import Limits
from fourhop.frontend.derender_endpoints import derender_chat, derender_completion
from fourhop.frontend.model import Model, SamplingDefaults
from fourhop.frontend.parsers import find
from fourhop.frontend.served import Served
from fourhop.wire.derender import (
    ChatDerenderChunk,
    ChatDerenderRequest,
    CompletionDerenderChunk,
    CompletionDerenderRequest,
)
from fourhop.wire.errors import ClientError, NotFound
from fourhop.wire.generate import ChunkChoice
from fourhop.wire.openai_chat import ChatCompletionResponse
from fourhop.wire.openai_completion import CompletionResponse

CALL = '<tool_call>\n{"name":"f","arguments":{"n":7}}\n</tool_call>'
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
REQUEST_ID = "generate-tokens-chatcmpl-1"


def served(reasoning: str | None = "qwen3", tool: str | None = "hermes") -> Served:
    eos = frozenset({EOS})
    model = Model(names=("toy", "alias"), max_model_len=512, eos_token_ids=eos, defaults=SamplingDefaults())
    return Served(
        model=model,
        tokenizer=toy(),
        parsers=find(reasoning, tool, toy()),
        limits=Limits(max_model_len=512, vocab_size=VOCAB_SIZE, max_num_choices=8, max_logprobs=2),
        prompt_of=lambda request: [*PROMPT, THINK] if request.messages[-1]["content"] == "think" else PROMPT,
        eos_token_ids=eos,
    )


def entry(token_id: int, num_top: int = 0) -> dict[str, Any]:
    tops = [{"token_id": 33, "logprob": -1.0}] * num_top
    return {"token_id": token_id, "logprob": -0.5, "top_logprobs": tops}


def choice(ids: list[int] | None, finish: str | None = "stop", **fields: Any) -> dict[str, Any]:
    return {"index": 0, "token_ids": ids, "finish_reason": finish, **fields}


def response(*choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"request_id": REQUEST_ID, "model": "toy", "created": 1, "choices": list(choices), **fields}


def chunk(*choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"request_id": REQUEST_ID, "choices": list(choices), **fields}


def chat(server: Served | None = None, **body: Any) -> ChatCompletionResponse | ChatDerenderChunk:
    """The body goes through JSON, as from a client."""
    request = msgspec.json.decode(msgspec.json.encode({"chat_request": CHAT, **body}), type=ChatDerenderRequest)
    return derender_chat(request, server or served(), created=7)


def completion(server: Served | None = None, **body: Any) -> CompletionResponse | CompletionDerenderChunk:
    request = msgspec.json.decode(msgspec.json.encode(body), type=CompletionDerenderRequest)
    return derender_completion(request, server or served(), created=7)


def whole(**body: Any) -> ChatCompletionResponse:
    answer = chat(**body)
    assert isinstance(answer, ChatCompletionResponse)
    return answer


def step(**body: Any) -> ChatDerenderChunk:
    answer = chat(stream=True, **body)
    assert isinstance(answer, ChatDerenderChunk)
    return answer


def streamed(ids: list[int], **body: Any) -> list[Any]:
    """The client's loop of the guide: one token a call, everything resent, the state echoed as JSON."""
    state, answers = None, []
    for number, token_id in enumerate(ids):
        finish = "stop" if number == len(ids) - 1 else None
        answer = step(
            generate_chunk=chunk(choice([token_id], finish)), stream_state=state, prompt_token_ids=PROMPT, **body
        )
        state = msgspec.to_builtins(answer.stream_state)
        answers.append(msgspec.to_builtins(answer.chunk))
    return answers


OUTPUT = [*encode(f"<think>r</think>a{CALL}"), EOS]


def test_a_whole_answer() -> None:
    answer = whole(
        generate_response=response(choice(OUTPUT), kv_transfer_params={"k": 1}, prompt_logprobs=[None]),
        prompt_tokens=5,
    )
    assert (answer.id, answer.model, answer.created) == (REQUEST_ID, "toy", 7)
    message = answer.choices[0].message
    assert (message.content, message.reasoning) == ("a", "r")
    assert message.tool_calls[0].function.name == "f"
    assert message.tool_calls[0].function.arguments == '{"n":7}'
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == len(OUTPUT)
    assert answer.usage.total_tokens == 5 + len(OUTPUT)
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 1
    assert answer.kv_transfer_params == {"k": 1}
    assert answer.prompt_logprobs == [None]
    assert answer.choices[0].token_ids is None


def test_the_streamed_answer_is_the_whole_one() -> None:
    """Case 52, over the calls of the guide's loop."""
    chunks = streamed(OUTPUT)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    message = whole(generate_response=response(choice(OUTPUT)), prompt_token_ids=PROMPT).choices[0].message
    assert "".join(d["content"] or "" for d in deltas) == message.content
    assert "".join(d["reasoning"] or "" for d in deltas) == message.reasoning
    calls = [call for d in deltas for call in d["tool_calls"]]
    assert [call["id"] for call in calls if "id" in call] == [message.tool_calls[0].id]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"n":7}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_role_is_in_the_first_delta_alone() -> None:
    roles = [c["choices"][0]["delta"].get("role") for c in streamed(encode("abc"))]
    assert roles == ["assistant", None, None]


@pytest.mark.parametrize("tool_choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("text", ["", "a", "<think>r", f"<think>r</think>{CALL}", CALL, f"a{CALL}"])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_derender_equals_the_answer_in_process(tool_choice: Any, text: str, finish: Any) -> None:
    """Case 52: field by field, call ids by their form."""
    ids = [*encode(text), EOS]
    request = {**CHAT, "tool_choice": tool_choice, "return_token_ids": True}
    apart = whole(generate_response=response(choice(ids, finish)), prompt_token_ids=PROMPT, chat_request=request)
    answer = Answer()
    derenderer = Derenderer.start(context("qwen3", "hermes", tool_choice=tool_choice), 0)
    for token_id in ids:
        answer.add(derenderer.feed(ChunkChoice(token_ids=[token_id])))
    answer.add(derenderer.feed(ChunkChoice(finish_reason=finish)))
    expected = answer.chat_choice(0, return_token_ids=True)
    assert _without_ids(apart.choices[0]) == _without_ids(expected)
    assert all(call.id.startswith("chatcmpl-tool-") for call in apart.choices[0].message.tool_calls)


def _without_ids(value: msgspec.Struct) -> Any:
    plain = msgspec.to_builtins(value)
    for call in plain["message"]["tool_calls"]:
        del call["id"]
    return plain


def test_a_usage_chunk_passes_through() -> None:
    """The client's prompt size wins, and with one choice the tokens that count and the thinking are known."""
    usage = {"prompt_tokens": 1, "completion_tokens": 9, "total_tokens": 10}
    first = step(generate_chunk=chunk(choice([THINK, 97], None)), prompt_token_ids=PROMPT)
    answer = step(
        generate_chunk=chunk(usage=usage), prompt_tokens=3, stream_state=msgspec.to_builtins(first.stream_state)
    )
    assert answer.chunk.choices == []
    assert msgspec.to_builtins(answer.chunk.usage) == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": None,
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    assert answer.stream_state == first.stream_state
    bare = step(generate_chunk=chunk(usage=usage))
    assert bare.stream_state is None
    assert bare.chunk.usage is not msgspec.UNSET and bare.chunk.usage is not None
    assert bare.chunk.usage.total_tokens == 10


def test_the_prompt_is_needed_once() -> None:
    first = step(generate_chunk=chunk(choice([97], None)), prompt_token_ids=[*PROMPT, THINK])
    state = msgspec.to_builtins(first.stream_state)
    absent = step(generate_chunk=chunk(choice([98], None)), stream_state=state)
    resent = step(generate_chunk=chunk(choice([98], None)), stream_state=state, prompt_token_ids=["not read"])
    assert absent == resent
    assert absent.chunk.choices[0].delta.reasoning == "b"


def test_a_finish_without_tokens_flushes() -> None:
    request = {**CHAT, "stop": ["ab"]}
    first = step(generate_chunk=chunk(choice([97], None)), prompt_token_ids=PROMPT, chat_request=request)
    assert first.chunk.choices[0].delta.content is None
    last = step(
        generate_chunk=chunk(choice([], "length")),
        stream_state=msgspec.to_builtins(first.stream_state),
        chat_request=request,
    )
    assert (last.chunk.choices[0].delta.content, last.chunk.choices[0].finish_reason) == ("a", "length")


def test_without_parsers_the_chat_request_may_be_left_out() -> None:
    server = served(None, None)
    answer = chat(server, generate_response=response(choice([*encode("<think>a"), EOS])), chat_request=None)
    assert isinstance(answer, ChatCompletionResponse)
    assert answer.choices[0].message.content == "<think>a"
    assert answer.usage.completion_tokens_details is None
    piece = chat(server, stream=True, generate_chunk=chunk(choice([97], None)), chat_request=None)
    assert isinstance(piece, ChatDerenderChunk)
    assert piece.chunk.choices[0].delta.content == "a"


def test_logprobs_survive_the_parsers() -> None:
    request = {**CHAT, "logprobs": True, "top_logprobs": 1}
    given = choice([THINK, 97], None, logprobs={"content": [entry(THINK), entry(97, 2)]})
    answer = step(generate_chunk=chunk(given), prompt_token_ids=PROMPT, chat_request=request)
    logprobs = answer.chunk.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [e.token for e in logprobs.content] == ["<think>", "a"]
    assert [top.token for top in logprobs.content[1].top_logprobs] == ["!"]


def test_an_empty_or_known_model_name() -> None:
    assert whole(generate_response=response(choice([97])), model="alias").model == "alias"
    assert whole(generate_response=response(choice([97])), model="").model == "toy"
    with pytest.raises(NotFound) as caught:
        whole(generate_response=response(choice([97])), model="other")
    assert caught.value.param == "model"


def test_the_engines_count_stands_in_for_the_prompt() -> None:
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 1,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    answer = whole(generate_response=response(choice([97]), usage=usage))
    assert answer.usage.prompt_tokens == 9
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


TOO_MANY = [97] * 513


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "generate_response"),
        ({"stream": True}, "generate_chunk"),
        ({"generate_response": response(choice([97])), "chat_request": None}, "chat_request"),
        ({"generate_response": response(choice([]))}, "generate_response.choices[0].token_ids"),
        ({"generate_response": response(choice(TOO_MANY))}, "generate_response.choices[0].token_ids"),
        ({"generate_response": response(choice([97, -1]))}, "generate_response.choices[0].token_ids"),
        ({"generate_response": response(choice([264]))}, "generate_response.choices[0].token_ids"),
        ({"generate_response": response(*[choice([97])] * 9)}, "generate_response.choices"),
        ({"generate_response": response(choice([97]), output_mode="text")}, "generate_response.output_mode"),
        (
            {"generate_response": response(choice([97]), prompt_logprobs=[None] * 513)},
            "generate_response.prompt_logprobs",
        ),
        ({"generate_response": response(choice([97])), "prompt_tokens": 2**63}, "prompt_tokens"),
        ({"generate_response": response(choice([97])), "prompt_tokens": -1}, "prompt_tokens"),
        ({"generate_response": response(choice([97])), "prompt_token_ids": TOO_MANY}, "prompt_token_ids"),
        ({"generate_response": response(choice([97])), "prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"generate_response": response(choice([97])), "prompt_token_ids": [1, "x"]}, "prompt_token_ids[1]"),
        (
            {"generate_response": response(choice([97], logprobs={"content": []}))},
            "generate_response.choices[0].logprobs.content",
        ),
        (
            {"generate_response": response(choice([97], logprobs={"content": [entry(97, 4)]}))},
            "generate_response.choices[0].logprobs.content[0].top_logprobs",
        ),
        ({"stream": True, "generate_chunk": chunk(choice([97], None))}, "prompt_token_ids"),
        ({"stream": True, "generate_chunk": chunk(choice([97]), choice([97]))}, "generate_chunk.choices"),
        ({"stream": True, "generate_chunk": chunk(choice([97], index=8))}, "generate_chunk.choices[0].index"),
        ({"stream": True, "generate_chunk": chunk(choice([97]), output_mode="text")}, "generate_chunk.output_mode"),
        (
            {"stream": True, "generate_chunk": chunk(choice([97])), "prompt_token_ids": [97], "prompt_tokens": 512},
            "generate_chunk.choices[0].token_ids",
        ),
        ({"generate_response": response(choice([97])), "chat_request": {**CHAT, "stop": ""}}, "chat_request.stop"),
    ],
)
def test_bad_bodies_are_named(body: dict[str, Any], param: str) -> None:
    """Protocol 3.4 and case 52; a good body is served after each."""
    with pytest.raises(ClientError) as caught:
        chat(**body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert whole(generate_response=response(choice(encode("ok</s>")))).choices[0].message.content == "ok"


@pytest.mark.parametrize(
    "state",
    [
        {},
        [],
        "x",
        {"version": 1, "check": 0, "data": "AAAA"},
        {"version": 1, "check": 0, "data": "?"},
        {"version": 1, "check": 0, "data": "A" * 4096},
        {"prev_tokens": [], "output_token_ids": [1]},
    ],
)
def test_bad_states_are_refused(state: Any) -> None:
    """Case 23."""
    with pytest.raises(ClientError) as caught:
        step(generate_chunk=chunk(choice([97], None)), prompt_token_ids=PROMPT, stream_state=state)
    assert (caught.value.status, caught.value.param) == (400, "stream_state")


def test_completions_number_their_choices_through() -> None:
    answer = completion(
        generate_responses=[
            response(choice(encode("a")), choice(encode("b"), "length")),
            response(choice(encode("cd"), "length")),
        ],
        prompt_tokens=[3, 4],
        prompt_token_ids=[[1, 2, 3], None],
        completion_request={"prompt": "x", "logprobs": 0},
    )
    assert isinstance(answer, CompletionResponse)
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, "", "stop"),
        (1, "b", "length"),
        (2, "cd", "length"),
    ]
    assert msgspec.to_builtins(answer.usage) | {"completion_tokens_details": None} == {
        "prompt_tokens": 7,
        "completion_tokens": 4,
        "total_tokens": 11,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


@pytest.mark.parametrize(("second", "kept"), [({"k": 1}, {"k": 1}), ({"k": 2}, None), (None, None)])
def test_transfer_params_stay_if_all_responses_agree(second: Any, kept: Any) -> None:
    answer = completion(
        generate_responses=[
            response(choice([97]), kv_transfer_params={"k": 1}),
            response(choice([97]), kv_transfer_params=second),
        ]
    )
    assert isinstance(answer, CompletionResponse)
    assert answer.kv_transfer_params == kept


def test_completions_stream_with_a_state() -> None:
    request = {"prompt": "x", "stop": ["cd"], "logprobs": 1}
    state, text, finish, offsets = None, "", None, []
    for token_id in b"ab\xc3\xa9cdz":
        given = choice([token_id], None, logprobs={"content": [entry(token_id)]})
        answer = completion(
            stream=True,
            generate_chunk=chunk(given),
            stream_state=state,
            prompt_tokens=1,
            prompt_token_ids=[120],
            completion_request=request,
        )
        assert isinstance(answer, CompletionDerenderChunk)
        state = msgspec.to_builtins(answer.stream_state)
        entry_ = answer.chunk.choices[0]
        text += entry_.text
        finish = finish or entry_.finish_reason
        offsets += entry_.logprobs.text_offset if entry_.logprobs else []
    assert (text, finish) == ("abé", "stop")
    assert offsets == [0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "generate_responses"),
        ({"generate_responses": []}, "generate_responses"),
        ({"generate_responses": [response(*[choice([97])] * 5)] * 2}, "generate_responses"),
        ({"generate_responses": [response(choice([97]))], "prompt_tokens": [1, 2]}, "prompt_tokens"),
        ({"generate_responses": [response(choice([97]))], "prompt_tokens": 1}, "prompt_tokens"),
        ({"generate_responses": [response(choice([97]))], "prompt_tokens": [2**63]}, "prompt_tokens[0]"),
        ({"generate_responses": [response(choice([97]))], "prompt_token_ids": []}, "prompt_token_ids"),
        ({"generate_responses": [response(choice([97]))], "prompt_token_ids": [[-1]]}, "prompt_token_ids[0]"),
        ({"generate_responses": [response(choice([]))]}, "generate_responses[0].choices[0].token_ids"),
        ({"stream": True}, "generate_chunk"),
        ({"stream": True, "generate_chunk": chunk(choice([97])), "prompt_tokens": [1]}, "prompt_tokens"),
    ],
)
def test_bad_completion_bodies_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ClientError) as caught:
        completion(**body)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(("message", "expected"), [("think", ("abc", None)), ("hi", (None, "abc"))])
def test_without_prompt_ids_the_chat_itself_tells_how_the_prompt_ends(
    message: str, expected: tuple[str | None, str | None]
) -> None:
    request = {"messages": [{"role": "user", "content": message}]}
    answer = whole(chat_request=request, generate_response=response(choice(encode("abc"), "length")))
    got = answer.choices[0].message
    assert (got.reasoning, got.content) == expected
