"""The last requests that a router served, to be asked about."""

from __future__ import annotations

from collections import OrderedDict

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fourhop.router.keys import ACCOUNT, Account
from fourhop.router.records import Ended
from fourhop.service import json_response
from fourhop.wire.errors import NotFound
from fourhop.wire.why import STORY_PATH, Story


class History:
    """At most `size` requests that ended, the oldest forgotten first. Two of one id and one account: the later one."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ended: OrderedDict[tuple[Account | None, str], Ended] = OrderedDict()

    def keep(self, ended: Ended, owner: Account | None = None) -> None:
        key = (owner, ended.request_id)
        self._ended.pop(key, None)
        self._ended[key] = ended
        while len(self._ended) > self._size:
            self._ended.popitem(last=False)

    def find(self, request_id: str, asker: Account | None = None) -> Story:
        """By the id that a log line names: the router's, or a frontend's, which is its end. The newest of several.

        An account finds its own requests only; None finds all. Raises NotFound.
        """
        known = [(name, one) for (owner, name), one in reversed(self._ended.items()) if asker in (None, owner)]
        found = next((one for name, one in known if name == request_id), None)
        if found is None:
            found = next((one for name, one in known if name.endswith(f"-{request_id}")), None)
        if found is None:
            raise NotFound(f"no request {request_id[:200]} among the last {len(known)}", param="request_id")
        return found.story()


def history_route(history: History) -> Route:
    async def story(request: Request) -> Response:
        return json_response(history.find(request.path_params["request_id"], ACCOUNT.get()))

    return Route(STORY_PATH + "{request_id:path}", story, methods=["GET"])
