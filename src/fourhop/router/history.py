"""The last requests that a router served, to be asked about."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.router.run import Run
from fourhop.service import json_response
from fourhop.wire.errors import NotFound
from fourhop.wire.moments import Moment
from fourhop.wire.why import STORY_PATH, Step, Story

WORDS = {
    Moment.RECEIVED: "received",
    Moment.ADMITTED: "admitted",
    Moment.PREFILL_STARTED: "prefill begins",
    Moment.PREFILL_DONE: "prefill is done, the first token is there",
    Moment.KV_REQUESTED: "decode asks for the KV",
    Moment.KV_READY: "decode has the KV",
    Moment.LAST_TOKEN: "the last token is there",
}


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
            ends = (one for name, one in reversed(self._stories.items()) if request_id and name.endswith(request_id))
            story = next(ends, None)
        if story is None:
            raise NotFound(f"no request {request_id[:200]} among the last {len(self._stories)}", param="request_id")
        return story


def steps_of(runs: Iterable[Run]) -> list[Step]:
    """What happened to all choices of a request, in order of time."""
    steps: list[Step] = []
    several = list(runs)
    for number, run in enumerate(several):
        prefix = f"choice {number}: " if len(several) > 1 else ""
        received_s = run.timeline.at_s[Moment.RECEIVED]
        told = [(at_s, WORDS[Moment(name)]) for name, at_s in run.timeline.at_s.items() if name in WORDS]
        if number:
            told = [(at_s, what) for at_s, what in told if what not in (WORDS[Moment.RECEIVED], WORDS[Moment.ADMITTED])]
        steps += [Step(at_s - received_s, prefix + what) for at_s, what in [*told, *run.told]]
    return sorted(steps, key=lambda step: step.after_s)


def history_route(history: History) -> Route:
    async def story(request: Request) -> Response:
        return json_response(history.find(request.path_params["request_id"]))

    return Route(STORY_PATH + "{request_id}", story, methods=["GET"])
