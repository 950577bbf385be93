"""`fourhop why REQUEST_ID`: what became of a request at a router, step by step, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import quote

import msgspec

from fourhop.tokens.address import check_url
from fourhop.tokens.connection import Timeouts, call, open_session, request_headers
from fourhop.wire.errors import FourhopError, NotFound, StartError
from fourhop.wire.why import STORY_PATH, Story

PATIENCE = Timeouts(first_byte_s=10.0, idle_s=10.0)


@dataclass(frozen=True)
class WhyConfig:
    """Who is asked.

    Attributes:
        url: Of the router, or of the `fourhop up` that it is in.
        api_key: Sent as a bearer token.
    """

    url: str = "http://127.0.0.1:8000"
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_url(self.url)


async def tell_why(request_id: str, config: WhyConfig) -> None:
    """Print the story of a request. Raises StartError when there is none."""
    print(shown(await fetch_story(request_id, config)))


async def fetch_story(request_id: str, config: WhyConfig) -> Story:
    address = f"{config.url.rstrip('/')}{STORY_PATH}{quote(request_id, safe='')}"
    try:
        async with (
            open_session() as session,
            call(session, "GET", address, headers=request_headers(config.api_key), timeouts=PATIENCE) as answer,
        ):
            return msgspec.json.decode(await answer.read_all(), type=Story)
    except FourhopError as error:
        is_elsewhere = error.status == NotFound.status and error.param is None  # no server that knows of stories
        raise StartError(f"{config.url} is no fourhop router" if is_elsewhere else error.message) from None
    except msgspec.DecodeError:
        raise StartError(f"{config.url} is no fourhop router") from None


def shown(story: Story) -> str:
    """The story as lines: what it was, and its steps with their times."""
    choices = f", {story.num_choices} choices" if story.num_choices > 1 else ""
    retries = f", {story.num_retries} retries" if story.num_retries else ""
    tokens = f"{story.num_prompt_tokens} prompt and {story.num_output_tokens} output tokens"
    head = f"{story.request_id}: {story.outcome}, {tokens}{choices}{retries}"
    return "\n".join([head, *(f"{step.after_s * 1e3:>10.1f} ms  {step.what}" for step in story.steps)])
