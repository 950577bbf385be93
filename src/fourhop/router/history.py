"""The last requests that a router served, to be asked about."""

from __future__ import annotations

from collections import OrderedDict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.service import json_response
from fourhop.wire.errors import NotFound
from fourhop.wire.why import STORY_PATH, Story


class History:
    """At most `size` stories, the oldest forgotten first. Two of one id: the later one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._stories: OrderedDict[str, Story] = OrderedDict()

    def keep(self, story: Story) -> None:
        self._stories.pop(story.request_id, None)
        self._stories[story.request_id] = story
        while len(self._stories) > self._size:
            self._stories.popitem(last=False)

    def find(self, request_id: str) -> Story:
        """By the id that a log line names: the router's, or a frontend's, which is its end. Raises NotFound."""
        story = self._stories.get(request_id)
        if story is None:
            ends = (one for name, one in reversed(self._stories.items()) if name.endswith(f"-{request_id}"))
            story = next(ends, None)
        if story is None:
            raise NotFound(f"no request {request_id[:200]} among the last {len(self._stories)}", param="request_id")
        return story


def history_route(history: History) -> Route:
    async def story(request: Request) -> Response:
        return json_response(history.find(request.path_params["request_id"]))

    return Route(STORY_PATH + "{request_id}", story, methods=["GET"])
