"""Inputs of the case list at the frontend's own door: what a client sends, and what it then gets, streamed or not.

Cases that are held where their rule lives (parsers, detokenizer, limits) are named in those tests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from tokenizers import Tokenizer as NativeTokenizer

from fakes.asgi import Exchange
from fakes.derendering import chunkings
from fakes.toy import (
    BOS,
    END_THINK,
    EOS,
    IM_END,
    TEMPLATE_TA,
    TEMPLATE_TT,
    THINK,
    TOOL_CALL,
    byte_symbols,
    write_toy_checkpoint,
)
from fourhop.checkpoint import Checkpoint
from fourhop.frontend.app import create
from fourhop.frontend.config import FrontendConfig
from fourhop.service import ServerConfig
from fourhop.wire.generate import ChunkChoice, FinishReason, GenerateChunk, GenerateRequest, Usage
from fourhop.wire.logprobs import ChoiceLogprobs, TokenLogprob
from fourhop.wire.sse import DONE, SSEDecoder

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@dataclass
class Steps:
    """F3: sends its chunks as they are, with log-probabilities where they are asked for."""

    chunks: list[ChunkChoice]
    requests: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        self.requests.append(request)
        for choice in self.chunks:
            await asyncio.sleep(0)
            logprobs = ChoiceLogprobs([TokenLogprob(token_id, -token_id / 4) for token_id in choice.token_ids])
            asked = request.sampling_params.logprobs is not None and bool(choice.token_ids)
            told = msgspec.structs.replace(choice, logprobs=logprobs if asked else None)
            yield GenerateChunk(request_id=request.request_id, choices=[told])
        num_prompt, num_tokens = len(request.token_ids), sum(len(choice.token_ids) for choice in self.chunks)
        usage = Usage(num_prompt, num_tokens, num_prompt + num_tokens)
        yield GenerateChunk(request_id=request.request_id, choices=[], usage=usage)


def steps(*groups: list[int], finish: FinishReason = "length") -> Steps:
    return Steps([*(ChunkChoice(0, group) for group in groups), ChunkChoice(0, [], finish)])


def groupings(ids: list[int]) -> list[list[list[int]]]:
    """F2: one by one, all at once, in two everywhere, and drawn."""
    found = [[choice.token_ids for choice in chunks if choice.token_ids] for chunks in chunkings(ids, None)]
    return list({str(groups): groups for groups in found}.values())


def frontend(folder: Path, upstream: Steps | None = None, **config: Any) -> Starlette:
    return create(FrontendConfig(**config), Checkpoint("toy", folder), ServerConfig(), upstream or steps([*b"ok"]))


def post(app: Starlette, path: str, body: Any, status: int = 200) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    exchange = Exchange("POST", path, {"content-type": "application/json"}, [raw])
    asyncio.run(exchange.run(app))
    assert exchange.status == status, exchange.content
    if not exchange.answer_headers["content-type"].startswith("text/event-stream"):
        return json.loads(exchange.content)
    *data, last = SSEDecoder().feed(exchange.content)
    assert last == DONE
    return [json.loads(event) for event in data]


def user(content: Any = "hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def prompt_of(app: Starlette, **chat: Any) -> str:
    """What is rendered of a chat, as text."""
    ids = post(app, f"{CHAT}/render", {"messages": user(), **chat})["token_ids"]
    return str(post(app, "/detokenize", {"tokens": ids})["prompt"])


@dataclass
class Seen:
    """A choice as a client puts it together."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name and arguments of each
    call_ids: list[str] = field(default_factory=list, compare=False)  # differ from one request to the next
    roles: int = 0
    finishes: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0


def seen(answer: Any, index: int = 0) -> Seen:
    """Of a stream's events, or of an answer in one piece."""
    found = Seen()
    for event in answer if isinstance(answer, list) else [answer]:
        for choice in event["choices"]:
            if choice["index"] == index:
                _add(found, choice)
    return found


def _add(found: Seen, choice: Any) -> None:
    message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    found.text += message.get("content") or ""
    found.reasoning += message.get("reasoning") or ""
    found.roles += message.get("role") == "assistant"
    for call in message.get("tool_calls", []):
        if "id" in call:
            found.calls.append(["", ""])
            found.call_ids.append(call["id"])
        for at, name in enumerate(("name", "arguments")):
            found.calls[-1][at] += call["function"].get(name, "")
    found.finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    found.token_ids += choice["token_ids"] or []
    logprobs = choice["logprobs"] or {}
    found.num_logprobs += len(logprobs.get("content") or logprobs.get("tokens") or [])


def both(app: Starlette, path: str, body: dict[str, Any], num_choices: int = 1) -> list[Seen]:
    """The choices of an answer, the same streamed and in one piece."""
    fields = {"return_token_ids": True, **body}
    whole, events = post(app, path, fields), post(app, path, fields | {"stream": True})
    choices = [seen(whole, index) for index in range(num_choices)]
    assert [seen(events, index) for index in range(num_choices)] == choices
    return choices


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_checkpoint(tmp_path_factory.mktemp("toy"))


# Templates


TOOL = (
    '{"type":"function","function":{"name":"z_tool","description":"a/b <c> & \'d\' \u2014 \u4e2d",'
    '"parameters":{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}}}'
)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        ("tojson", {}),
        ("tojson(indent=2)", {"indent": 2}),
        ("tojson(sort_keys=true)", {"sort_keys": True}),
        ("tojson(separators=(',', ':'))", {"separators": (",", ":")}),
    ],
)
def test_case_7_a_tool_is_printed_as_it_was_sent(tmp_path: Path, call: str, options: dict[str, Any]) -> None:
    folder = write_toy_checkpoint(tmp_path, template="{{ tools[0] | " + call + " }}")
    raw = f'{{"messages":[{{"role":"user","content":"x"}}],"tool_choice":"none","tools":[{TOOL}]}}'.encode()
    app = frontend(folder)
    ids = post(app, f"{CHAT}/render", raw)["token_ids"]
    printed = json.dumps(json.loads(TOOL), ensure_ascii=False, **options)
    assert post(app, "/detokenize", {"tokens": ids})["prompt"] == printed
    assert "\u4e2d" in printed and ("sort_keys" in options) != (printed.index('"b"') < printed.index('"a"'))


@pytest.mark.parametrize("final", ["The answer is ", "", "user", "hi", [{"type": "text", "text": "x"}]])
def test_case_8_a_prompt_that_is_continued_ends_with_the_final_text(folder: Path, final: Any) -> None:
    app = frontend(folder)
    fields = {"messages": [*user(), {"role": "assistant", "content": final}], "continue_final_message": True}
    printed = final if isinstance(final, str) else "x"
    text = prompt_of(app, **fields, add_generation_prompt=False)
    assert text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{printed}"
    error = post(app, CHAT, fields | {"add_generation_prompt": True}, status=400)["error"]
    assert error["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"enable_thinking": "false"}, "chat_template_kwargs.enable_thinking"),
        ({"messages": []}, "chat_template_kwargs.messages"),
        ({"tools": None}, "chat_template_kwargs.tools"),
        ({"tokenize": False}, "chat_template_kwargs.tokenize"),
        ({"chat_template": "x"}, "chat_template_kwargs.chat_template"),
        ({"add_generation_prompt": False}, "chat_template_kwargs.add_generation_prompt"),
    ],
)
def test_case_10_reserved_and_ambiguous_template_arguments_are_refused(
    tmp_path: Path, kwargs: dict[str, Any], param: str
) -> None:
    app = frontend(write_toy_checkpoint(tmp_path, template=TEMPLATE_TT))
    for path in (CHAT, f"{CHAT}/render", "/tokenize"):
        assert post(app, path, {"messages": user(), "chat_template_kwargs": kwargs}, 400)["error"]["param"] == param
    assert post(app, CHAT, {"messages": user(), "chat_template_kwargs": {"unused": 1}})["choices"]


def test_case_10_a_request_wins_over_the_servers_default(tmp_path: Path) -> None:
    folder = write_toy_checkpoint(tmp_path, template=TEMPLATE_TT)
    app = frontend(folder, default_chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(app).endswith("<think>\n\n</think>\n\n")
    assert prompt_of(app, chat_template_kwargs={"enable_thinking": True}).endswith("<think>\n")


KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def test_case_11_a_template_that_refuses_developers_gets_system(tmp_path: Path) -> None:
    app = frontend(write_toy_checkpoint(tmp_path, template=KNOWN_ROLES))
    developer = {"role": "developer", "content": "be brief"}
    assert prompt_of(app, messages=[developer, *user()]) == "[system]be brief[user]hi"
    system = {"role": "system", "content": "s"}
    assert (
        prompt_of(app, messages=[system, developer, *user(), developer])
        == "[system]s\n\nbe brief[user]hi[system]be brief"
    )
    error = post(app, CHAT, {"messages": [{"role": "narrator", "content": "x"}]}, 400)["error"]
    assert error["message"] == "unknown role narrator"


# Tokens


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("writes_bos", [False, True])
def test_case_14_bos_is_there_once_or_as_it_was_sent(tmp_path: Path, adds_bos: bool, writes_bos: bool) -> None:
    template = ("{{ bos_token }}" if writes_bos else "") + TEMPLATE_TA
    app = frontend(write_toy_checkpoint(tmp_path, template=template, add_bos=adds_bos))

    def completion(prompt: Any, **fields: Any) -> Any:
        return post(app, f"{COMPLETION}/render", {"prompt": prompt, **fields})[0]["token_ids"]

    ids = post(app, f"{CHAT}/render", {"messages": user()})["token_ids"]
    assert ids.count(BOS) == writes_bos and (ids[0] == BOS) == writes_bos
    assert completion("a") == [BOS] * adds_bos + [97]
    assert completion("<s>a") == [BOS, 97]
    assert completion("a", add_special_tokens=False) == [97]
    assert completion([97]) == [97] and completion([BOS, BOS, 97]) == [BOS, BOS, 97]


HALF, PAIR = "\\ud83d", "\\ud83d\\ude42"
CALL = '"tool_calls":[{"id":"c","type":"function","function":{"name":"%s","arguments":"%s"}}]'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"messages":[{"role":"user","content":"x%sy"}]%s}', "messages[0].content"),
        (
            '{"messages":[{"role":"user","content":"x"},{"role":"assistant",' + CALL % ("f%s", "{}") + "}]%s}",
            "messages[1].tool_calls[0].function.name",
        ),
        (
            '{"messages":[{"role":"user","content":"x"},{"role":"assistant",'
            + CALL % ("f", '{\\"a\\":\\"%s\\"}')
            + "}]%s}",
            "messages[1].tool_calls[0].function.arguments",
        ),
        ('{"messages":[{"role":"user","content":"x"}],"stop":["%s"]%s}', "stop[0]"),
        ('{"messages":[{"role":"user","content":"x"}],"user":"%s"%s}', "user"),
    ],
)
@pytest.mark.parametrize("stream", ["", ',"stream":true'])
def test_case_16_half_a_character_is_refused_by_path(folder: Path, body: str, param: str, stream: str) -> None:
    app = frontend(folder)
    assert post(app, CHAT, (body % (HALF, stream)).encode(), 400)["error"]["param"] == param
    assert post(app, CHAT, (body % (PAIR, stream)).encode())


def test_case_16_half_a_character_may_be_escaped_once_more(folder: Path) -> None:
    """The arguments are a text that is JSON: what is half a character only in there is found as well."""
    app = frontend(folder)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
    body = {"messages": [*user(), {"role": "assistant", "tool_calls": [call]}]}
    error = post(app, CHAT, body, 400)["error"]
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETION, {"prompt": []}, "prompt"),
        (COMPLETION, {"prompt": [-1]}, "prompt[0]"),
        (COMPLETION, {"prompt": [264]}, "prompt[0]"),
        (COMPLETION, {"prompt": [[-1]]}, "prompt[0][0]"),
        (COMPLETION, {"prompt": [True]}, "prompt[0]"),
        (COMPLETION, {"prompt": [1.5]}, "prompt[0]"),
        (COMPLETION, {"prompt": ""}, "prompt"),
        (COMPLETION, {"prompt": "a", "stop_token_ids": [264]}, "stop_token_ids[0]"),
        (COMPLETION, {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids[0]"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"264": 1}}, "logit_bias"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"5": 1000}}, "logit_bias.5"),
        (COMPLETION, {"prompt": "a", "allowed_token_ids": [264]}, "allowed_token_ids[0]"),
    ],
)
def test_case_17_ids_that_are_none_are_refused_and_the_next_request_is_served(
    folder: Path, path: str, fields: dict[str, Any], param: str
) -> None:
    app = frontend(folder)
    fresh = post(app, path, {"prompt": "a", "logit_bias": {}})["choices"]
    assert post(app, path, fields, 400)["error"]["param"] == param
    assert post(app, path, {"prompt": "a", "logit_bias": {}})["choices"] == fresh


def merged_toy(tmp_path: Path) -> Path:
    """The toy with one merge: `ab` is a token of its own."""
    folder = write_toy_checkpoint(tmp_path, template=TEMPLATE_TT)
    saved = json.loads((folder / "tokenizer.json").read_text())
    symbols = byte_symbols()
    saved["model"]["vocab"]["ab"] = 264
    saved["model"]["merges"] = [[symbols[97], symbols[98]]]
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 265}))
    assert NativeTokenizer.from_file(str(folder / "tokenizer.json")).encode("ab").ids == [264]
    return folder


def test_case_20_everybody_sees_the_same_ids(tmp_path: Path) -> None:
    upstream = steps([97], [98])
    app = frontend(merged_toy(tmp_path), upstream, default_chat_template_kwargs={"enable_thinking": False})
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    body = {
        "messages": [*user(parts), {"role": "assistant", "content": "so "}],
        "tools": [json.loads(TOOL)],
        "tool_choice": "none",
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "low",
        "continue_final_message": True,
        "add_generation_prompt": False,
        "surprise": {"a": True},
    }
    rendered = post(app, f"{CHAT}/render", body)["token_ids"]
    answer = post(app, CHAT, body | {"return_token_ids": True})
    assert upstream.requests[-1].token_ids == answer["prompt_token_ids"] == rendered
    tokenized = {name: value for name, value in body.items() if name not in ("tool_choice", "reasoning_effort")}
    assert post(app, "/tokenize", tokenized)["tokens"] == rendered
    assert 264 in rendered and answer["choices"][0]["token_ids"] == [97, 98]
    conversation = [*rendered, *answer["choices"][0]["token_ids"], 33]
    post(app, COMPLETION, {"prompt": conversation})
    assert upstream.requests[-1].token_ids == conversation, "what was generated as two tokens stays two"


# Text


@pytest.mark.parametrize("groups", groupings([139, 33]))
def test_case_22_half_a_character_of_the_prompt_brings_nothing_of_it(folder: Path, groups: list[list[int]]) -> None:
    app = frontend(folder, steps(*groups))
    (choice,) = both(app, COMPLETION, {"prompt": [72, 105, 32, 240, 159, 145]})
    assert choice.text == "\U0001f44b!"


@pytest.mark.parametrize("groups", groupings([65, 255, 255, 226, 130, 66, 172, 67]))
def test_case_25_bytes_that_are_no_text_are_replaced(folder: Path, groups: list[list[int]]) -> None:
    app = frontend(folder, steps(*groups))
    (choice,) = both(app, COMPLETION, {"prompt": "p"})
    ids = [token_id for group in groups for token_id in group]
    assert choice.text == bytes(ids).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (["\n"], "k", "k"),
        (["<END>"], "a<", "a<"),
        (["tre"], "un, due, tre, quattro", "un, due, "),
    ],
)
def test_case_28_what_was_held_is_not_lost_and_nothing_comes_after_a_stop(
    folder: Path, stop: list[str], text: str, shown: str
) -> None:
    upstream = steps()
    app = frontend(folder, upstream)
    for groups in groupings([*text.encode(), EOS])[::3]:
        upstream.chunks = steps(*groups, finish="stop").chunks
        (choice,) = both(app, COMPLETION, {"prompt": "p", "stop": stop})
        assert (choice.text, choice.finishes) == (shown, ["stop"])
        assert post(app, CHAT, {"messages": user(), "stop": stop})["choices"][0]["message"]["content"] == shown


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_case_29_tokens_after_a_stop_string_count_for_nothing(folder: Path, path: str) -> None:
    upstream = Steps([ChunkChoice(0, [*b"abcdef"], "length")])
    app = frontend(folder, upstream)
    body: dict[str, Any] = {"messages": user(), "logprobs": True} if path == CHAT else {"prompt": "p", "logprobs": 0}
    (choice,) = both(app, path, body | {"stop": ["cd"]})
    assert (choice.text, choice.token_ids, choice.num_logprobs, choice.finishes) == ("ab", [*b"abcd"], 4, ["stop"])
    assert post(app, path, body | {"stop": ["cd"]})["usage"]["completion_tokens"] == 4
    upstream.chunks = [ChunkChoice(0, [120, EOS, 121, 122], "length")]
    (choice,) = both(app, path, body)
    assert (choice.text, choice.token_ids, choice.num_logprobs, choice.finishes) == ("x", [120, EOS], 2, ["stop"])


def test_case_31_a_stop_token_in_the_middle_of_a_step(folder: Path) -> None:
    app = frontend(folder, Steps([ChunkChoice(0, [104, 105, 33, 97]), ChunkChoice(0, [], "length")]))
    (choice,) = both(app, COMPLETION, {"prompt": "p", "stop_token_ids": [33]})
    assert (choice.text, choice.finishes) == ("hi", ["stop"])


@pytest.mark.parametrize("stop", [["zz"], ["7.5"]])
def test_case_31_markers_are_read_before_anything_is_held(folder: Path, stop: list[str]) -> None:
    upstream = steps()
    app = frontend(folder, upstream, reasoning_parser="qwen3")
    for groups in groupings([THINK, *b"7.5", END_THINK, *b"ok"]):
        upstream.chunks = steps(*groups).chunks
        (choice,) = both(app, CHAT, {"messages": user(), "stop": stop})
        assert (choice.text, choice.reasoning) == ("ok", "7.5")


# The API


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_case_53_usage_is_streamed_once_and_last_if_it_is_asked_for(
    folder: Path, path: str, n: int, options: dict[str, bool] | None
) -> None:
    chunks = [ChunkChoice(index, [*b"x"]) for _ in range(3) for index in range(n)]
    app = frontend(folder, Steps([*chunks, *(ChunkChoice(index, [], "length") for index in range(n))]))
    body: dict[str, Any] = {"messages": user()} if path == CHAT else {"prompt": "p"}
    events = post(app, path, body | {"stream": True, "n": n, "stream_options": options})
    assert all("choices" in event for event in events)
    with_usage = [event for event in events if event.get("usage") is not None]
    if options == {"include_usage": True}:
        assert with_usage == events[-1:] and events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 3 * n
        assert [bool(choice["finish_reason"]) for event in events[-1 - n : -1] for choice in event["choices"]] == [
            True
        ] * n
    else:
        assert with_usage == [] and all(event["choices"] for event in events)


@pytest.mark.parametrize(
    ("num_prompt", "limits", "resolved"),
    [
        (10, {"max_tokens": 1020}, (1024, 10, 1020)),
        (1024, {"max_tokens": 1}, (1024, 1024, 1)),
        (1023, {}, 1),
        (10, {}, 1014),
        (10, {"max_tokens": None}, 1014),
        (10, {"max_tokens": 0}, "max_tokens"),
        (10, {"max_tokens": -1}, "max_tokens"),
        (10, {"max_tokens": 7, "max_completion_tokens": 9}, 9),
        (10, {"max_tokens": 9, "max_completion_tokens": 7}, 7),
    ],
)
def test_case_55_limits(tmp_path: Path, num_prompt: int, limits: dict[str, Any], resolved: Any) -> None:
    app = frontend(write_toy_checkpoint(tmp_path, template="{{ messages[0].content }}"), max_model_len=1024)
    body = {"messages": user("a" * num_prompt), **limits}
    if isinstance(resolved, int):
        assert post(app, f"{CHAT}/render", body)["sampling_params"]["max_tokens"] == resolved
        return
    error = post(app, CHAT, body, 400)["error"]
    if isinstance(resolved, str):
        assert error["param"] == resolved
    else:
        assert all(str(number) in error["message"] for number in resolved)


@pytest.mark.parametrize(("stop", "ends"), [([], [EOS, IM_END]), ([7], [EOS, IM_END, 7])])
def test_case_55_the_models_own_ends_stay_beside_the_clients(tmp_path: Path, stop: list[int], ends: list[int]) -> None:
    folder = write_toy_checkpoint(tmp_path, generation_config={"eos_token_id": [EOS, IM_END]})
    for end in ends:
        app = frontend(folder, steps([*b"a", end, *b"b"], finish="length"))
        (choice,) = both(app, COMPLETION, {"prompt": "p", "stop_token_ids": stop, "skip_special_tokens": False})
        assert (choice.text, choice.finishes) == ("a", ["stop"])


A = [*b"r1", END_THINK, *b"a1"]
B = [*b"r2", END_THINK, TOOL_CALL, *b'{"name":"f","arguments":{}}', TOOL_CALL + 1]
LONGEST = max(len(A), len(B))


@pytest.mark.parametrize(
    "order",
    [
        [(index, at) for at in range(LONGEST) for index in (0, 1)],
        [(index, at) for index in (0, 1) for at in range(LONGEST)],
        [(index, at) for index in (1, 0) for at in range(LONGEST)],
    ],
    ids=["in turns", "B delayed", "A delayed"],
)
def test_case_56_choices_share_nothing(tmp_path: Path, order: list[tuple[int, int]]) -> None:
    outputs = (A, B)
    chunks = [ChunkChoice(index, [outputs[index][at]]) for index, at in order if at < len(outputs[index])]
    ends = [ChunkChoice(index, [], "stop") for index in (0, 1)]
    folder = write_toy_checkpoint(tmp_path, template=TEMPLATE_TT)
    settings = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    app = frontend(folder, Steps([*chunks, *ends]), **settings)
    body = {"messages": user(), "tools": [{"type": "function", "function": {"name": "f"}}], "n": 2}
    first, second = both(app, CHAT, body, num_choices=2)
    assert (first.text, first.reasoning, first.calls, first.finishes) == ("a1", "r1", [], ["stop"])
    assert (second.text, second.reasoning, second.finishes) == ("", "r2", ["tool_calls"])
    assert second.calls == [["f", "{}"]]
    events = post(app, CHAT, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert [seen(events, index).roles for index in (0, 1)] == [1, 1]
    assert [event["usage"]["completion_tokens"] for event in events if event["usage"]] == [len(A) + len(B)]


OLD_MISTRAL = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{% endfor %}"
    "{% if m.role == 'tool' and m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ['[TOOL_CALLS][{"name":"f","arguments":{}}]', "[TOOL_CALLS]f[ARGS]{}"])
def test_case_44_the_id_of_a_call_is_good_for_the_next_turn(tmp_path: Path, text: str, stream: bool) -> None:
    folder = write_toy_checkpoint(tmp_path, template=OLD_MISTRAL)
    app = frontend(folder, steps([*text.encode()], finish="stop"), tool_call_parser="mistral")
    tools = [{"type": "function", "function": {"name": "f"}}]
    (call_id,) = seen(post(app, CHAT, {"messages": user(), "tools": tools, "stream": stream})).call_ids
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call_id, "content": "7"}
    assert post(app, CHAT, {"messages": [*user(), history, result], "tools": tools})["choices"]
