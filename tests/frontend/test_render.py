from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.toy import BOS, IM_END, IM_START, TEMPLATE_TA, TEMPLATE_TT, THINK, VOCAB_SIZE, write_toy_checkpoint
from fourhop.checkpoint import Checkpoint
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.load import load_renderer
from fourhop.frontend.render import Renderer, for_engine
from fourhop.wire.errors import ClientError, NotFound, StartError
from fourhop.wire.generate import GenerateRequest
from fourhop.wire.openai_chat import ChatCompletionRequest
from fourhop.wire.openai_completion import CompletionRequest

WINDOW = 2048
USER = {"role": "user", "content": "hi"}
NUM_PROMPT = len("Suser\nhiE\nSassistant\n")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def load(folder: Path, config: FrontendConfig | None = None, **checkpoint: Any) -> Renderer:
    return load_renderer(Checkpoint("toy", write_toy_checkpoint(folder, **checkpoint)), config or FrontendConfig())


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return load(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    config = FrontendConfig(
        allow_client_kv_transfer=True,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        served_model_name=("a", "b"),
        default_chat_template_kwargs={"enable_thinking": False},
        max_num_choices=4,
    )
    return load(tmp_path_factory.mktemp("trusting"), config, template=TEMPLATE_TT)


def chat(renderer: Renderer, **fields: Any) -> GenerateRequest:
    return renderer.chat(msgspec.convert({"messages": [USER], **fields}, ChatCompletionRequest), "r")


def complete(renderer: Renderer, prompt: Any, **fields: Any) -> list[GenerateRequest]:
    return renderer.completion(msgspec.convert({"prompt": prompt, **fields}, CompletionRequest), "r")


def refused(call: Any, *args: Any, **fields: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        call(*args, **fields)
    return caught.value


@given(text=st.text())
def test_chat_ids_are_the_tokenizers_own(renderer: Renderer, text: str) -> None:
    ids = chat(renderer, messages=[{"role": "user", "content": text}]).token_ids
    expected = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert ids == renderer.tokenizer.encode(expected, add_special_tokens=False)


@given(text=st.text(min_size=1))
def test_completion_ids_are_the_tokenizers_own(renderer: Renderer, text: str) -> None:
    assert complete(renderer, text)[0].token_ids == renderer.tokenizer.encode(text, add_special_tokens=True)


def test_chat_request(renderer: Renderer) -> None:
    rendered = chat(renderer, stream=True, stream_options={"include_usage": True}, seed=7, cache_salt="s", model="toy")
    assert rendered.request_id == "chatcmpl-r"
    assert rendered.token_ids[0] == IM_START
    assert rendered.stream and rendered.stream_options is not None and rendered.stream_options.include_usage
    assert (rendered.sampling_params.seed, rendered.cache_salt, rendered.model) == (7, "s", "toy")
    assert rendered.sampling_params.max_tokens == WINDOW - len(rendered.token_ids)
    assert rendered.reasoning_ended is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 16}, 16),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": WINDOW - NUM_PROMPT}, WINDOW - NUM_PROMPT),
        ({"max_tokens": None}, WINDOW - NUM_PROMPT),
        ({}, WINDOW - NUM_PROMPT),
    ],
)
def test_max_tokens_is_always_written(renderer: Renderer, fields: dict[str, Any], expected: int) -> None:
    """Case 55."""
    wire = msgspec.json.decode(msgspec.json.encode(chat(renderer, **fields)))
    assert wire["sampling_params"]["max_tokens"] == expected


def test_generation_config_gives_defaults(tmp_path: Path) -> None:
    defaults = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": None, "max_new_tokens": 9, "eos_token_id": 257}
    renderer = load(tmp_path, generation_config=defaults)
    params = chat(renderer).sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.max_tokens) == (0.5, 0.9, 20, 0.0, 9)
    params = chat(renderer, temperature=0, top_k=-1, max_tokens=30).sampling_params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, -1, 30)


def test_stops_stay_for_the_derenderer_and_leave_the_engines_request(renderer: Renderer) -> None:
    rendered = chat(renderer, stop=["x", "y", "x"], stop_token_ids=[5, 5, 6], model="toy")
    assert rendered.sampling_params.stop == ["x", "y"]
    assert rendered.sampling_params.stop_token_ids == [5, 6]
    assert for_engine(rendered).sampling_params.stop == []
    assert for_engine(rendered).model is None
    assert chat(renderer, stop="x").sampling_params.stop == ["x"]


def test_logprobs(renderer: Renderer) -> None:
    assert chat(renderer).sampling_params.logprobs is None
    assert chat(renderer, logprobs=True).sampling_params.logprobs == 0
    assert chat(renderer, logprobs=True, top_logprobs=20).sampling_params.logprobs == 20
    assert complete(renderer, "a", logprobs=2)[0].sampling_params.logprobs == 2


def test_prompts(renderer: Renderer) -> None:
    assert [(r.request_id, r.token_ids) for r in complete(renderer, "a")] == [("cmpl-r", [97])]
    assert [(r.request_id, r.token_ids) for r in complete(renderer, ["a", "b"])] == [
        ("cmpl-r-0", [97]),
        ("cmpl-r-1", [98]),
    ]
    assert [r.token_ids for r in complete(renderer, [1, 2])] == [[1, 2]]
    assert [r.token_ids for r in complete(renderer, [[1, 2], [3]])] == [[1, 2], [3]]


def test_bos_is_written_once(tmp_path: Path) -> None:
    """Case 14."""
    renderer = load(tmp_path, add_bos=True, template="{{ bos_token }}" + TEMPLATE_TA)
    assert chat(renderer).token_ids[:2] == [BOS, IM_START]
    assert complete(renderer, "a")[0].token_ids == [BOS, 97]
    assert complete(renderer, "<s>a")[0].token_ids == [BOS, 97]
    assert complete(renderer, "<s><s>a", add_special_tokens=False)[0].token_ids == [BOS, BOS, 97]
    assert complete(renderer, "a", add_special_tokens=False)[0].token_ids == [97]
    assert complete(renderer, [97])[0].token_ids == [97]
    assert complete(renderer, "<s>a", return_token_offsets=True)[0].token_offsets == [[0, 3], [3, 4]]


def test_offsets_only_when_asked_for(renderer: Renderer) -> None:
    assert complete(renderer, "aé", return_token_offsets=True)[0].token_offsets == [[0, 1], [1, 2], [1, 2]]
    assert complete(renderer, "aé")[0].token_offsets is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"n": 0}, "n"),
        ({"n": 257}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": WINDOW}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": [str(number) for number in range(65)]}, "stop"),
        ({"stop": ["a", "b" * 1025]}, "stop[1]"),
        ({"stop": "b" * 1025}, "stop"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"logit_bias": {"264": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"5": 1000}}, "logit_bias.5"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"best_of": 2}, "best_of"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"echo": True}, "echo"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "a" * WINDOW}]}, "messages"),
        ({"tools": []}, "tools"),
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"tools": None}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"enable_thinking": "False "}}, "chat_template_kwargs.enable_thinking"),
    ],
)
def test_bad_chat_is_refused_by_path(renderer: Renderer, fields: dict[str, Any], param: str) -> None:
    error = refused(chat, renderer, **fields)
    assert (error.status, error.param) == (400, param)
    assert error.message


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ("", {}, "prompt"),
        ([[]], {}, "prompt[0]"),
        ([-1], {}, "prompt[0]"),
        ([1, VOCAB_SIZE], {}, "prompt[1]"),
        ([10**18], {}, "prompt[0]"),
        ([[1], [2, -1]], {}, "prompt[1][1]"),
        (["a", 1], {}, "prompt"),
        ("a" * WINDOW, {}, "prompt"),
        (["a", "b" * WINDOW], {}, "prompt[1]"),
        (["a"] * 257, {}, "prompt"),
        ("a", {"echo": True, "logprobs": 21}, "logprobs"),
        ("a", {"logprobs": 21}, "logprobs"),
        ("a", {"suffix": "b"}, "suffix"),
        ("a", {"best_of": 3}, "best_of"),
        ("a", {"max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_completion_is_refused_by_path(renderer: Renderer, prompt: Any, fields: dict[str, Any], param: str) -> None:
    error = refused(complete, renderer, prompt, **fields)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {}},
        {"logit_bias": {"0": -100, "263": 100}},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None, "guided_json": None, "use_beam_search": False, "bad_words": []},
        {"best_of": 2, "n": 2},
        {"tools": [TOOL], "tool_choice": "none"},
        {"n": None, "temperature": None, "stop": None, "seed": -1, "user": "someone", "anything": {"a": 1}},
        {"chat_template_kwargs": {"unused": 1}},
    ],
)
def test_harmless_fields_pass(renderer: Renderer, fields: dict[str, Any]) -> None:
    assert chat(renderer, **fields).token_ids == chat(renderer).token_ids


def test_too_long_names_window_prompt_and_limit(renderer: Renderer) -> None:
    """Case 55."""
    for num_prompt, num_asked, param in ((3000, 5, "prompt"), (WINDOW, 1, "prompt"), (10, WINDOW - 9, "max_tokens")):
        error = refused(complete, renderer, "a" * num_prompt, max_tokens=num_asked)
        assert error.param == param
        assert all(str(number) in error.message for number in (WINDOW, num_prompt, num_asked))


def test_longest_prompt_leaves_one_token(renderer: Renderer) -> None:
    assert complete(renderer, "a" * (WINDOW - 1), max_tokens=None)[0].sampling_params.max_tokens == 1


def test_default_of_the_model_fits_the_window(tmp_path: Path) -> None:
    renderer = load(tmp_path, generation_config={"max_new_tokens": 100})
    assert complete(renderer, "a" * (WINDOW - 9), max_tokens=None)[0].sampling_params.max_tokens == 9


def test_model_names(renderer: Renderer, trusting: Renderer) -> None:
    for name in ("a", "b", "", None):
        assert chat(trusting, model=name).token_ids
    for render in (chat, lambda r, **f: complete(r, "a", **f)):
        with pytest.raises(NotFound, match="`gpt`") as caught:
            render(renderer, model="gpt")
        assert (caught.value.status, caught.value.param) == (404, "model")


def test_template_kwargs_override_the_servers_defaults(trusting: Renderer) -> None:
    """Case 10."""
    assert chat(trusting).token_ids[-1] == 10 and chat(trusting).token_ids.count(THINK) == 1
    assert chat(trusting, chat_template_kwargs={"enable_thinking": True}).token_ids[-2:] == [THINK, 10]


def test_reasoning_ended_comes_from_the_prompt(trusting: Renderer) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    assert chat(trusting).reasoning_ended is True
    assert chat(trusting, **thinking).reasoning_ended is False
    assert chat(trusting, **thinking, include_reasoning=False).reasoning_ended is True
    assert chat(trusting, **thinking).reasoning_parser_kwargs == thinking


def test_tools_with_the_flags(trusting: Renderer) -> None:
    assert chat(trusting, tools=[TOOL]).token_ids
    assert chat(trusting, tools=[TOOL], tool_choice="auto").token_ids
    assert chat(trusting, tools=[TOOL], tool_choice="required").sampling_params.structured_outputs


def test_transfer_params_of_a_trusted_client(trusting: Renderer) -> None:
    rendered = chat(trusting, kv_transfer_params={"do_remote_decode": True})
    assert rendered.kv_transfer_params == {"do_remote_decode": True}
    rendered = chat(trusting, kv_transfer_params={"do_remote_decode": True, "prompt_token_ids": [1, 2]})
    assert (rendered.token_ids, rendered.kv_transfer_params) == ([1, 2], {"do_remote_decode": True})
    rendered = complete(trusting, "ignored", kv_transfer_params={"prompt_token_ids": [1, 2]})[0]
    assert (rendered.token_ids, rendered.kv_transfer_params) == ([1, 2], None)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"prompt_token_ids": "x"}, "kv_transfer_params.prompt_token_ids"),
        ({"prompt_token_ids": []}, "messages"),
        ({"prompt_token_ids": [VOCAB_SIZE]}, "messages"),
        ({"something": 1}, "kv_transfer_params"),
        ({"do_remote_prefill": True}, "kv_transfer_params.ticket_id"),
    ],
)
def test_bad_transfer_params(trusting: Renderer, params: dict[str, Any], param: str) -> None:
    assert refused(chat, trusting, kv_transfer_params=params).param == param


def test_choices_are_counted_over_prompts(trusting: Renderer) -> None:
    assert len(complete(trusting, ["a", "b"], n=2)) == 2
    assert refused(complete, trusting, ["a", "b"], n=3).param == "prompt"


def test_controls_in_a_chat_are_those_of_the_template(renderer: Renderer) -> None:
    ids = chat(renderer).token_ids
    assert (ids.count(IM_START), ids.count(IM_END)) == (2, 1)


def test_window_beyond_the_model_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="max_model_len 4096"):
        load(tmp_path, FrontendConfig(max_model_len=4096))
    assert load(tmp_path, FrontendConfig(max_model_len=100)).model.max_model_len == 100
