"""What a router remembers of a request: how it was served, and why so (`GET /router/requests/{id}`)."""

from __future__ import annotations

import msgspec

STORY_PATH = "/router/requests/"


class Step(msgspec.Struct, frozen=True, gc=False):
    """Something that happened `after_s` seconds after the request was received."""

    after_s: float
    what: str


class Story(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that ended. `steps` are in order of time, those of all its choices."""

    request_id: str
    outcome: str
    status: int | None
    error: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_choices: int
    num_retries: int
    steps: list[Step]
