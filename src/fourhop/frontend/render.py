"""Render: an OpenAI request becomes GenerateRequests, prompt ids and resolved parameters. Pure: no I/O, no clock.

Control tokens that a user types in a message become the real ones, as they do with transformers and vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.conversation import prepare_messages
from fourhop.frontend.model import Model
from fourhop.frontend.names import chat_names, completion_names, rename
from fourhop.frontend.parsers import Parsers
from fourhop.frontend.sampling import (
    chat_logprobs,
    check_chat,
    check_completion,
    completion_prompt_logprobs,
    is_prompt_alone,
    resolve,
)
from fourhop.frontend.structure import Structure, chat_structure, grammar_start, structure_of
from fourhop.frontend.template import ChatTemplates
from fourhop.frontend.tokenizer import Tokenizer
from fourhop.tokens.limits import Limits, check_settings, check_token_ids
from fourhop.wire.errors import ClientError, client_error
from fourhop.wire.generate import GenerateRequest, SamplingParams
from fourhop.wire.openai import SamplingRequest
from fourhop.wire.openai_chat import ChatCompletionRequest
from fourhop.wire.openai_completion import CompletionRequest
from fourhop.wire.structure import GrammarStart

CHAT_ID, COMPLETION_ID = "chatcmpl-", "cmpl-"


@dataclass(frozen=True)
class Prompt:
    """Rendered ids, and if they were asked for, the [start, end) characters of each."""

    token_ids: list[int]
    offsets: list[list[int]] | None = None


@dataclass(frozen=True)
class Renderer:
    """Everything that rendering depends on. Safe to use from several threads."""

    config: FrontendConfig
    model: Model
    tokenizer: Tokenizer
    templates: ChatTemplates
    parsers: Parsers

    def chat(self, request: ChatCompletionRequest, request_id: str) -> GenerateRequest:
        """Raises ClientError with the path of what is wrong, NotFound for another model's name."""
        self.model.check_name(request.model)
        check_chat(request, self.config)
        structure = chat_structure(request)
        given, transfer = self._transfer(request)
        prompt = self.chat_prompt(request) if given is None else Prompt(given)
        uses_new_name = request.max_completion_tokens is not None
        params = self._params(
            request,
            prompt,
            asked_tokens=request.max_completion_tokens if uses_new_name else request.max_tokens,
            logprobs=chat_logprobs(request),
            prompt_logprobs=request.prompt_logprobs,
            structure=structure,
            param="messages",
        )
        kwargs = self.template_kwargs(request)
        rendered = self._generate_request(request, prompt, params, CHAT_ID + request_id, transfer)
        rendered = msgspec.structs.replace(
            rendered,
            reasoning_ended=self._reasoning_ended(request, prompt.token_ids, kwargs),
            reasoning_parser_kwargs={"chat_template_kwargs": kwargs} if self.parsers.has_reasoning else None,
            grammar_start=self._grammar_start(request, structure, prompt.token_ids, kwargs),
        )
        self._check(rendered, chat_names(request), has_own_ids=given is None)
        return rendered

    def completion(self, request: CompletionRequest, request_id: str) -> list[GenerateRequest]:
        """One GenerateRequest for each prompt, in order. Raises as `chat`."""
        self.model.check_name(request.model)
        check_completion(request)
        structure = structure_of(request)
        given, transfer = self._transfer(request)
        texts_or_ids = _prompts(request.prompt) if given is None else {"prompt": given}
        num_choices = len(texts_or_ids) * (1 if request.n is None else request.n)
        if len(texts_or_ids) > 1 and (num_choices > self.config.max_num_choices or transfer is not None):
            reason = f"n times prompts is at most {self.config.max_num_choices}, and 1 with kv_transfer_params"
            raise ClientError(f"prompt: too many prompts: {reason}", param="prompt")
        rendered = []
        for index, (path, prompt) in enumerate(texts_or_ids.items()):
            suffix = f"-{index}" if len(texts_or_ids) > 1 else ""
            rendered.append(
                self._one(request, prompt, path, f"{COMPLETION_ID}{request_id}{suffix}", transfer, structure)
            )
        return rendered

    def chat_prompt(self, request: ChatCompletionRequest) -> Prompt:
        """The ids of a conversation: exactly what the template writes, special tokens only where it writes them."""
        messages = prepare_messages(request.messages)
        text = self.templates.choose(has_tools=request.tools is not None).render(
            messages,
            tools=request.tools,
            documents=request.documents,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=self.template_kwargs(request),
        )
        return self.encode(
            text, add_special_tokens=request.add_special_tokens, offsets=bool(request.return_token_offsets)
        )

    def template_kwargs(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """The server's defaults, then the request's reasoning effort, then the request's own kwargs."""
        effort = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
        return {**self.config.default_chat_template_kwargs, **effort, **(request.chat_template_kwargs or {})}

    def encode(self, text: str, *, add_special_tokens: bool, offsets: bool = False) -> Prompt:
        """The ids of a text. A BOS that the text begins with already is not added again."""
        spans: list[list[int]] | None = None
        if offsets:
            ids, spans = self.tokenizer.encode_with_offsets(text, add_special_tokens=add_special_tokens)
        else:
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        bos = self.tokenizer.token_id(self.tokenizer.special_tokens.get("bos_token", ""))
        skip = int(add_special_tokens and bos is not None and ids[:2] == [bos, bos])
        return Prompt(ids[skip:] if skip else ids, spans and spans[skip:])

    def _one(
        self,
        request: CompletionRequest,
        prompt: str | list[int],
        path: str,
        request_id: str,
        transfer: dict[str, Any] | None,
        structure: Structure | None,
    ) -> GenerateRequest:
        if isinstance(prompt, str):
            rendered = self.encode(
                prompt, add_special_tokens=request.add_special_tokens, offsets=bool(request.return_token_offsets)
            )
        else:
            rendered = Prompt(prompt)
        params = self._params(
            request,
            rendered,
            asked_tokens=1 if is_prompt_alone(request) else request.max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=completion_prompt_logprobs(request),
            structure=structure,
            param=path,
        )
        generate = self._generate_request(request, rendered, params, request_id, transfer)
        self._check(generate, completion_names(request, path), has_own_ids=isinstance(prompt, str))
        return generate

    def _params(
        self,
        request: SamplingRequest,
        prompt: Prompt,
        *,
        asked_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        structure: Structure | None,
        param: str,
    ) -> SamplingParams:
        window, num_tokens = self.model.max_model_len, len(prompt.token_ids)
        if num_tokens >= window:
            raise ClientError(
                f"{param}: the prompt has {num_tokens} tokens; the model's maximum context length is {window} tokens, "
                f"and the request asks for {1 if asked_tokens is None else asked_tokens} more",
                param=param,
            )
        return resolve(
            request,
            self.model.defaults,
            asked_tokens=asked_tokens,
            room=window - num_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=None if structure is None else structure.outputs,
        )

    def _grammar_start(
        self,
        request: ChatCompletionRequest,
        structure: Structure | None,
        token_ids: list[int],
        kwargs: Mapping[str, Any],
    ) -> GrammarStart | None:
        if structure is None:
            return None
        return grammar_start(request, structure, token_ids, kwargs, parsers=self.parsers, tokenizer=self.tokenizer)

    def _generate_request(
        self,
        request: SamplingRequest,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        transfer: dict[str, Any] | None,
    ) -> GenerateRequest:
        return GenerateRequest(
            request_id=request_id,
            token_ids=prompt.token_ids,
            token_offsets=prompt.offsets,
            sampling_params=params,
            model=request.model,
            stream=bool(request.stream),
            stream_options=request.stream_options,
            return_token_ids=request.return_token_ids,
            cache_salt=request.cache_salt,
            priority=0 if request.priority is None else request.priority,
            targets=request.targets,
            kv_transfer_params=transfer,
        )

    def _transfer(self, request: SamplingRequest) -> tuple[list[int] | None, dict[str, Any] | None]:
        """The prompt ids that come with the client's transfer parameters, if any, and the parameters without them."""
        if request.kv_transfer_params is None:
            return None, None
        if not self.config.allow_client_kv_transfer:
            raise ClientError("this server takes no kv_transfer_params from clients", param="kv_transfer_params")
        try:
            ids = msgspec.convert(request.kv_transfer_params, _WithPrompt).prompt_token_ids
        except msgspec.ValidationError as error:
            raise client_error(error, "kv_transfer_params") from None
        rest = {name: value for name, value in request.kv_transfer_params.items() if name != "prompt_token_ids"}
        return ids, rest or None

    def _reasoning_ended(
        self, request: ChatCompletionRequest, token_ids: list[int], kwargs: Mapping[str, Any]
    ) -> bool | None:
        ended = self.parsers.reasoning_ended(token_ids, kwargs)
        return ended if ended is None or request.include_reasoning else True

    def _check(self, rendered: GenerateRequest, names: Mapping[str, str], *, has_own_ids: bool) -> None:
        """Ranges, ids and counts, as every TokenServer checks them; the path is that of the client's own field.

        A prompt that was tokenized here has ids of this vocabulary. Who serves says whether it knows priorities and
        targets.
        """
        limits = Limits(
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=self.model.max_model_len,
            max_num_choices=self.config.max_num_choices,
            max_logprobs=self.config.max_logprobs,
        )
        try:
            check_settings(msgspec.structs.replace(for_engine(rendered), priority=0, targets=None), limits)
            if not has_own_ids:
                check_token_ids(rendered.token_ids, limits.vocab_size, "token_ids")
        except ClientError as error:
            rename(error, names)
            raise


def for_engine(request: GenerateRequest, traceparent: str | None = None) -> GenerateRequest:
    """The request as a tier without text takes it: no stop strings, whichever model it serves, and its trace."""
    params = msgspec.structs.replace(request.sampling_params, stop=[])
    return msgspec.structs.replace(request, sampling_params=params, model=None, traceparent=traceparent)


class _WithPrompt(msgspec.Struct, frozen=True):
    prompt_token_ids: list[int] | None = None


def _prompts(prompt: str | list[str | int | list[int]]) -> dict[str, str | list[int]]:
    """Each prompt by its path in the request. One list may hold texts, or ids, or lists of ids."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not prompt:
        raise ClientError("prompt: must not be empty", param="prompt")
    texts = [entry for entry in prompt if isinstance(entry, str)]
    ids = [entry for entry in prompt if isinstance(entry, int)]
    lists = [entry for entry in prompt if isinstance(entry, list)]
    if len(ids) == len(prompt):
        return {"prompt": ids}
    if len(texts) == len(prompt) or len(lists) == len(prompt):
        entries: list[str | list[int]] = [*texts, *lists]
        return {f"prompt[{index}]": entry for index, entry in enumerate(entries)}
    raise ClientError("prompt: must hold texts, or ids, or lists of ids, not a mixture", param="prompt")
