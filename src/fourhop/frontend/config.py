"""What a frontend is told. One dataclass; the command line's flags derive from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FrontendConfig:
    """A frontend: names, limits, templates and parsers.

    Attributes:
        served_model_name: Names that requests may use; answers carry the first. Default: the model as it was given.
        max_model_len: Longest sequence, prompt and output together. Default: what the model allows.
        reasoning_parser: Markup of the model's thinking, by vLLM's names (docs/parsers.md), or none. Default: what the
            chat template shows.
        tool_call_parser: Markup of the model's tool calls, by vLLM's names, or none. Default: what the chat template
            shows.
        parser_plugin: More families of markup, each a Plugin as MODULE:ATTRIBUTE.
        enable_auto_tool_choice: Let the model call tools when a request has some. Default: where there is a tool call
            parser.
        chat_template: A file, or the template itself, instead of the checkpoint's.
        default_chat_template_kwargs: JSON object of values for the chat template; a request's own values win.
        max_logprobs: Most alternatives a request may ask for.
        max_num_choices: Most choices of one request: n, times the number of prompts.
        num_render_workers: Threads for templates and tokenization.
        max_render_waiting: Requests that may wait for these threads or be in one; more are refused with 503.
        allow_client_kv_transfer: Take kv_transfer_params from clients. Only where every client is trusted: they name
            hosts and blocks that engines will read.
    """

    served_model_name: tuple[str, ...] = ()
    max_model_len: int | None = None
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    parser_plugin: tuple[str, ...] = ()
    enable_auto_tool_choice: bool | None = None
    chat_template: str | None = None
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_logprobs: int = 20
    max_num_choices: int = 256
    num_render_workers: int = 1
    max_render_waiting: int = 256
    allow_client_kv_transfer: bool = False

    def __post_init__(self) -> None:
        if self.enable_auto_tool_choice and self.tool_call_parser == "none":
            raise ValueError("enable_auto_tool_choice needs a tool_call_parser")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if self.max_logprobs < 0:
            raise ValueError(f"max_logprobs must not be negative, not {self.max_logprobs}")
        if self.max_num_choices < 1:
            raise ValueError(f"max_num_choices must be at least 1, not {self.max_num_choices}")
        if self.max_render_waiting < 1:
            raise ValueError(f"max_render_waiting must be at least 1, not {self.max_render_waiting}")
        if self.num_render_workers < 1:
            raise ValueError(f"num_render_workers must be at least 1, not {self.num_render_workers}")
