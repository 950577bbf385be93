"""What clients got in a storm, and whether it is what they should have."""

from __future__ import annotations

from dataclasses import dataclass, field

from faults.requests import Answer, Ask
from fourhop.wire.errors import FourhopError
from fourhop.wire.generate import GenerateChunk


class Wrong(Exception):
    """An invariant does not hold."""


@dataclass
class Reply:
    """What one client got. It `left` when it broke off by itself."""

    ask: Ask
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    has_usage: bool = False
    error: FourhopError | None = None
    left: bool = False

    def add(self, chunk: GenerateChunk) -> None:
        """Take in a chunk of a stream, which must be one that may come now."""
        if self.has_usage:
            raise Wrong(f"request {self.ask.number}: a chunk after the usage")
        for choice in chunk.choices:
            if choice.index in self.finishes:
                raise Wrong(f"request {self.ask.number}: choice {choice.index} goes on after its end")
            self.token_ids.setdefault(choice.index, []).extend(choice.token_ids)
            if choice.finish_reason is not None:
                self.finishes[choice.index] = choice.finish_reason
        if not chunk.choices:
            self.has_usage = True

    @property
    def outcome(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__} {self.error.status}: {self.error.message}"
        return "left" if self.left else "finished"


def check_reply(reply: Reply, right: list[Answer]) -> None:
    """Exactly one end, and every token the right one, also of an answer that broke off. Raises Wrong."""
    number = reply.ask.number
    for index, tokens in reply.token_ids.items():
        wanted = right[index].token_ids
        if tokens != wanted[: len(tokens)]:
            raise Wrong(f"request {number}, choice {index}: {tokens} is not the beginning of {wanted}")
    if reply.error is not None or reply.left:
        return
    if not reply.has_usage:
        raise Wrong(f"request {number} just stopped")
    got = [Answer(reply.token_ids.get(index, []), reply.finishes.get(index, "")) for index in range(len(right))]
    if got != right:
        raise Wrong(f"request {number}: {got} is not {right}")
