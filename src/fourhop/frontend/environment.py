"""The jinja2 environment in which chat templates run.

Source: transformers 5, `utils/chat_template_utils.py`: sandboxed and immutable, blocks trimmed, `tojson` without
escaping, `raise_exception`, `strftime_now`, loop controls and the `generation` tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Clock = Callable[[], datetime]


class Refusal(jinja2.TemplateError):
    """The template itself refused the request, through `raise_exception`."""


def environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    """A fresh environment; `clock` gives the local time to `strftime_now`."""
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda format: clock().strftime(format)
    env.globals["dict"] = _Dict()
    env.globals["namespace"] = _Namespace
    return env


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with short ways to what a conversation is made of: the keys of plain dicts, the methods of texts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._is_safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As jinja2 has it: an attribute if there is one, else the item. A plain dict has only its class's own."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _SAFE_METHODS) or (kind is LoopContext and attribute in _SAFE_LOOP):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As jinja2 has it, remembered: the answer is a matter of the object's class and the name alone."""
        key = (type(obj), attr)
        known = self._is_safe.get(key)
        if known is None:
            known = super().is_safe_attribute(obj, attr, value)
            if len(self._is_safe) < MAX_REMEMBERED:
                self._is_safe[key] = known
        return known


_DICT_ATTRIBUTES = frozenset(dir(dict))
_SAFE_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
"""Of texts; the sandbox lets all of them through as they are, but for the two that look into their arguments."""

_SAFE_LOOP = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"})
"""Of the `loop` inside of a loop."""

MAX_REMEMBERED = 10_000
"""Names that a template may look up: it can make them out of a request."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's own text for training; here it only encloses."""

    tags = {"generation"}  # noqa: RUF012  (the attribute is jinja2's)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` for templates without the class itself, whose attributes lead out of the sandbox."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, /, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """`namespace` that takes no underscore-prefixed names."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template cannot set {name!r} on a namespace")
