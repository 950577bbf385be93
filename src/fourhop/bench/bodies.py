"""A conversation as the body of a request, for each protocol. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fourhop.bench.config import BackendName, SamplingConfig, TargetConfig
from fourhop.bench.workload import Turn, Vocabulary, text_of


@dataclass
class Talk:
    """What was said so far in one conversation: as one row of token ids, and as chat messages."""

    vocabulary: Vocabulary
    is_chat: bool
    key: str
    ids: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    num_asked: int = 0

    def ask(self, turn: Turn) -> None:
        """The user's next turn. A chat has it as text, which may have another number of tokens than the ids."""
        self.num_asked = len(self.ids) + len(turn.ids)
        self.ids += turn.ids
        if self.is_chat:
            text = text_of(turn.ids, self.vocabulary, self.key) if turn.text is None else turn.text
            self.messages.append({"role": "user", "content": text})

    def answered(self, ids: Sequence[int], text: str) -> None:
        """The server's answer: its ids where they came, else those of its text."""
        self.ids += ids or self.vocabulary.encode(text)
        if self.is_chat:
            self.messages.append({"role": "assistant", "content": text})

    def forget(self) -> None:
        """The talk is at its last turn: what was said is not needed again. `num_asked` stays."""
        self.ids, self.messages = [], []


class Bodies:
    """Makes the bodies of all requests of a run. The fields of `extra_body` win."""

    def __init__(self, target: TargetConfig, sampling: SamplingConfig, model: str, *, ignore_eos: bool) -> None:
        self._backend: BackendName = target.backend
        self._extra = dict(target.extra_body)
        self._model = model
        given = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        self._sampling = {name: value for name, value in given.items() if value is not None}
        if ignore_eos:
            self._sampling["ignore_eos"] = True

    @property
    def is_chat(self) -> bool:
        return self._backend in ("vllm-chat", "openai-chat")

    def body(self, talk: Talk, num_output: int) -> bytes:
        """The JSON of a streamed request for an answer of `num_output` tokens."""
        fields = self._generate(talk, num_output) if self._backend == "generate" else self._openai(talk, num_output)
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(fields | self._extra)

    def _generate(self, talk: Talk, num_output: int) -> dict[str, Any]:
        params = self._sampling | {"max_tokens": num_output}
        return {"model": self._model, "token_ids": talk.ids, "sampling_params": params}

    def _openai(self, talk: Talk, num_output: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self._model, **self._sampling}
        if self.is_chat:
            fields |= {"messages": talk.messages, "max_completion_tokens": num_output}
        else:
            fields |= {"prompt": talk.ids, "max_tokens": num_output}
        if self._backend.startswith("vllm"):
            fields["return_token_ids"] = True
        return fields
