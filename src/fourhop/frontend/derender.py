"""One choice of a request: token chunks in, what the client sees out. Streamed or not, this is the only way.

Rules that the sizes of the chunks never change:

- A token that ends the choice (EOS or a stop token id) counts but is not text, unless `include_stop_str_in_output`.
  Tokens after it, or after the token that completes a stop string, do not exist.
- Stop strings are looked for in the answer's content. Thinking and calls are never cut by one, and text on the two
  sides of a marker is not one text.
- An echoed prompt comes with the first delta. Stop strings are not looked for in it.
- `length` and `abort` stay as they are; `stop` becomes `tool_calls` when a call is complete and none was named.
"""

from __future__ import annotations

import zlib
from typing import Literal, TypeVar

import msgspec

from fourhop.frontend.context import Context, chat_context, completion_context
from fourhop.frontend.detokenize import Detokenizer
from fourhop.frontend.echo import Echo, read_prompt
from fourhop.frontend.logprobs import chat_logprobs, completion_logprobs, join_logprobs
from fourhop.frontend.output import CallCount, Output, call_seed
from fourhop.frontend.parsers.machine import Machine, Position
from fourhop.frontend.stops import HeldTail
from fourhop.wire.derender import Count, StreamState
from fourhop.wire.errors import ClientError
from fourhop.wire.generate import ChunkChoice
from fourhop.wire.logprobs import PromptLogprobs
from fourhop.wire.openai_chat import ChatFinishReason, ChatLogprobs, ToolCallDelta
from fourhop.wire.openai_completion import CompletionLogprobs

__all__ = ["Context", "Delta", "Derenderer", "chat_context", "completion_context"]

STATE_VERSION = 1

T = TypeVar("T")


class Delta(msgspec.Struct, frozen=True):
    """What one chunk adds. `num_tokens` of its tokens count; `num_reasoning_tokens` of those were thinking.

    `stopped` says that the choice is over although the engine may go on: a stop string was completed, or tokens came
    after a stop token. `token_ids` are the tokens the client may see; `logprobs` (chat) or `completion_logprobs` are
    aligned with them, and present only if they were asked for.
    """

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] = []
    logprobs: ChatLogprobs | None = None
    completion_logprobs: CompletionLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: str | int | None = None
    stopped: bool = False
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    token_ids: list[int] = []


class Snapshot(msgspec.Struct, array_like=True):
    """All that a Derenderer remembers. `ended` is "token" from a stop token to the finish, "finished" after that."""

    detokenizer: Detokenizer
    position: Position
    held: HeldTail
    calls: CallCount
    num_tokens: Count = 0
    num_reasoning_tokens: Count = 0
    ended: Literal["", "token", "finished"] = ""
    stop_token_id: Count | None = None


class Derenderer:
    """Turns one choice's chunks into deltas. A step costs its tokens; `state` is small and is all there is."""

    def __init__(self, context: Context, snapshot: Snapshot, echo: Echo | None = None) -> None:
        self._context = context
        self._echo = echo
        self._snapshot = snapshot
        self._output = Output(context, snapshot.held, snapshot.calls)
        self._machine = Machine(context.table, snapshot.position, self._output)
        # Where a stop string or a textual marker ends, and each token's place in the text, show token by token.
        self._has_offsets = context.completion_top_logprobs is not None
        self._is_stepwise = bool(context.stops) or context.table.has_text_markers or self._has_offsets

    @classmethod
    def start(cls, context: Context, index: int) -> Derenderer:
        """At the beginning of choice `index`. Raises ClientError if the prompt is to be echoed and is not known."""
        prompt = context.prompt_token_ids
        if context.echo and prompt is None:
            raise ClientError("prompt_token_ids are required with echo", param="prompt_token_ids")
        first = context.parsers.first_state(prompt, context.chat_template_kwargs)
        detokenizer, echo = _before_answer(prompt, context)
        snapshot = Snapshot(
            detokenizer=detokenizer,
            position=Position(state=context.table.numbers[first]),
            held=HeldTail(),
            calls=CallCount(call_seed(context.request_id, prompt or [], index)),
        )
        return cls(context, snapshot, echo)

    @classmethod
    def resume(cls, context: Context, state: StreamState) -> Derenderer:
        """Where `state` was taken. Raises ClientError for a state that is not ours or not this request's."""
        if state.version != STATE_VERSION or state.check != zlib.crc32(state.data):
            raise ClientError("the stream state is damaged or of another version", param="stream_state")
        try:
            snapshot = msgspec.msgpack.decode(state.data, type=Snapshot)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ClientError("the stream state is malformed", param="stream_state") from None
        if not _belongs_to(snapshot, context):
            raise ClientError("the stream state is not of this request", param="stream_state")
        return cls(context, snapshot)

    def state(self) -> StreamState:
        data = msgspec.msgpack.encode(self._snapshot)
        return StreamState(STATE_VERSION, zlib.crc32(data), data)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole choice so far that count."""
        return self._snapshot.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """Thinking tokens of the whole choice so far, markers not counted."""
        return self._snapshot.num_reasoning_tokens

    def feed(self, choice: ChunkChoice, prompt_logprobs: PromptLogprobs | None = None) -> Delta:
        """Take the choice's next chunk; with the first one goes what is known of the prompt, if that is echoed.

        After the finish everything is ignored. Raises ClientError for `prompt_logprobs` that are not the prompt's.
        """
        delta = self._feed(_without_tokens(choice) if self._context.drops_output else choice)
        echo, self._echo = self._echo, None
        return delta if echo is None else self._echoed(echo, delta, prompt_logprobs)

    def _feed(self, choice: ChunkChoice) -> Delta:
        snapshot, output = self._snapshot, self._output
        if snapshot.ended == "finished":
            return Delta()
        reasoning_before = snapshot.num_reasoning_tokens
        step = _Step(0) if snapshot.ended else self._take_tokens(choice)
        snapshot.num_tokens += step.num_tokens
        goes_on = snapshot.ended == "token" and step.num_tokens < len(choice.token_ids) and not choice.finish_reason
        finish, stop_reason = None, None
        if output.stops.hit or goes_on or choice.finish_reason:
            finish, stop_reason = self._finish(choice)
        return Delta(
            content=output.take_content(),
            reasoning=output.take_reasoning(),
            tool_calls=output.take_calls(),
            logprobs=self._chat_logprobs(choice, step) if choice.logprobs else None,
            completion_logprobs=self._completion_logprobs(choice, step) if choice.logprobs else None,
            finish_reason=finish,
            stop_reason=stop_reason,
            stopped=goes_on or output.stops.hit is not None,
            num_tokens=step.num_tokens,
            num_reasoning_tokens=snapshot.num_reasoning_tokens - reasoning_before,
            token_ids=step.pick(choice.token_ids),
        )

    def _take_tokens(self, choice: ChunkChoice) -> _Step:
        """Read tokens up to the one that ends the choice."""
        snapshot, machine, context = self._snapshot, self._machine, self._context
        detokenizer, tokenizer = snapshot.detokenizer, context.tokenizer
        step = _Step(len(choice.token_ids))
        ending = _ending_token(choice)
        run: list[bytes] = []
        for number, token_id in enumerate(choice.token_ids):
            if self._has_offsets:
                step.text_offsets.append(detokenizer.num_chars)
            if machine.state.is_reasoning and not context.include_reasoning:
                step.hidden.append(number)
            is_stop = token_id in context.stop_token_ids or number == ending
            if token_id in machine.state.by_id:
                self._read(run)
                machine.text(detokenizer.flush())
                machine.marker(token_id)
            elif token_id not in context.skipped and (context.include_stop or not is_stop):
                run.append(detokenizer.piece(token_id, tokenizer))
                if self._is_stepwise:
                    self._read(run)
            if is_stop or self._output.stops.hit:
                step.num_tokens = number + 1
                if is_stop:
                    snapshot.ended = "token"
                    snapshot.stop_token_id = None if token_id in context.eos_token_ids else token_id
                break
        self._read(run)
        return step

    def _read(self, run: list[bytes]) -> None:
        """Pass the bytes of some tokens on. A token is thinking if it stands in thinking and does not end it."""
        if not run:
            return
        was_reasoning = self._machine.state.is_reasoning
        self._machine.text(self._snapshot.detokenizer.feed(b"".join(run)))
        if was_reasoning and self._machine.state.is_reasoning:
            self._snapshot.num_reasoning_tokens += len(run)
        run.clear()

    def _finish(self, choice: ChunkChoice) -> tuple[ChatFinishReason, str | int | None]:
        """Let go of everything that was held, through the parsers; the reason, and what stopped it."""
        snapshot, stops = self._snapshot, self._output.stops
        if stops.hit is None:
            self._machine.text(snapshot.detokenizer.flush())
            self._machine.finish()
            self._output.boundary()
        # Whoever moves a request goes on with it; a client that sees its end here got a part of it.
        reason: ChatFinishReason = "abort" if choice.finish_reason == "migrated" else choice.finish_reason or "stop"
        stop_reason = choice.stop_reason
        if stops.hit is not None:
            reason, stop_reason = "stop", stops.hit
        elif snapshot.ended == "token" and choice.finish_reason != "stop":
            reason, stop_reason = "stop", snapshot.stop_token_id
        snapshot.ended = "finished"
        if reason == "stop" and snapshot.calls.num_complete and not self._context.is_call_named:
            reason = "tool_calls"
        return reason, stop_reason

    def _echoed(self, echo: Echo, delta: Delta, prompt_logprobs: PromptLogprobs | None) -> Delta:
        """The prompt, then the first delta of its answer."""
        logprobs, num_top = delta.completion_logprobs, self._context.completion_top_logprobs
        if num_top is not None:
            logprobs = join_logprobs(echo.logprobs(prompt_logprobs, num_top, self._context.tokenizer), logprobs)
        content = echo.text + (delta.content or "")
        return msgspec.structs.replace(delta, content=content, completion_logprobs=logprobs)

    def _chat_logprobs(self, choice: ChunkChoice, step: _Step) -> ChatLogprobs | None:
        num_top = self._context.chat_top_logprobs
        if num_top is None or choice.logprobs is None:
            return None
        return chat_logprobs(step.pick(choice.logprobs.content), num_top, self._context.tokenizer)

    def _completion_logprobs(self, choice: ChunkChoice, step: _Step) -> CompletionLogprobs | None:
        num_top = self._context.completion_top_logprobs
        if num_top is None or choice.logprobs is None:
            return None
        entries = step.pick(choice.logprobs.content)
        return completion_logprobs(entries, step.text_offsets, num_top, self._context.tokenizer)


class _Step(msgspec.Struct):
    """Which tokens of a chunk count: the first `num_tokens`. Offsets are in characters."""

    num_tokens: int
    hidden: list[int] = []
    text_offsets: list[int] = []

    def pick(self, values: list[T]) -> list[T]:
        """Of values given one a token, those that the client may see."""
        counted = values[: self.num_tokens]
        if not self.hidden:
            return counted
        return [value for number, value in enumerate(counted) if number not in self.hidden]


def _before_answer(prompt: list[int] | None, context: Context) -> tuple[Detokenizer, Echo | None]:
    """The detokenizer that stands behind the prompt, and the prompt if it is echoed.

    A prompt that is not known is taken to end in whole, visible text.
    """
    if prompt is None:
        return Detokenizer(), None
    if not context.echo:
        return Detokenizer.after(prompt, context.tokenizer, context.skipped), None
    detokenizer = Detokenizer(at_start=True)
    return detokenizer, read_prompt(prompt, detokenizer, context.tokenizer, context.skipped)


def _without_tokens(choice: ChunkChoice) -> ChunkChoice:
    """What is left of a chunk of an answer that was to have no tokens."""
    return ChunkChoice(
        choice.index, finish_reason="length" if choice.finish_reason in ("stop", "length") else choice.finish_reason
    )


def _ending_token(choice: ChunkChoice) -> int:
    """The place of the token that the engine ended the choice for; -1 if it is not the last of this chunk.

    A stop reason that is a text means that the engine found a stop string, whose tokens are text.
    """
    ended = choice.finish_reason == "stop" and not isinstance(choice.stop_reason, str)
    return len(choice.token_ids) - 1 if ended else -1


def _belongs_to(snapshot: Snapshot, context: Context) -> bool:
    """Whether the numbers in a snapshot mean something in this request."""
    held, stops = snapshot.held, context.stops.phrases
    is_held = held.num_chars == 0 or (held.stop < len(stops) and held.num_chars < len(stops[held.stop]))
    return is_held and snapshot.position.state < len(context.table.states)
