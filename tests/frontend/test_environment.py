"""The short ways through the sandbox lead where jinja2's own way does."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from jinja2 import Undefined
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from fourhop.frontend.environment import environment

OBJECTS: list[Any] = [
    "text",
    {"role": "user", "items": 1, "_x": 2, "format": 3},
    {},
    [1],
    (1,),
    1,
    1.5,
    None,
    True,
    datetime(2026, 11, 29),
    Namespace({"role": 1}),
    str,
    dict,
    lambda: 1,
    (letter for letter in "ab"),
    str.format,
    "a".format,
]
NAMES = [
    *(name for kind in (str, dict, list, datetime) for name in dir(kind)),
    *("role", "content", "_x", "mro", "__class__", "gi_frame", "func_globals", "__globals__", "format", "format_map"),
]


def outcome(env: ImmutableSandboxedEnvironment, obj: Any, name: str) -> Any:
    found = env.getattr(obj, name)
    if isinstance(found, Undefined):
        try:
            return str(found)
        except SecurityError:
            return SecurityError
    return getattr(found, "__qualname__", found)


@pytest.mark.parametrize("obj", OBJECTS, ids=repr)
def test_attributes_are_those_of_the_plain_sandbox(obj: Any) -> None:
    ours, plain = environment(datetime.now), ImmutableSandboxedEnvironment()
    for _ in range(2):  # the second time from memory
        for name in NAMES:
            assert outcome(ours, obj, name) == outcome(plain, obj, name), name


def test_memory_of_names_is_bounded() -> None:
    env = environment(datetime.now)
    for number in range(20_000):
        env.is_safe_attribute("", f"name{number}", None)
    assert not env.is_safe_attribute("", "__class__", None)
    assert len(vars(env)["_is_safe"]) == 10_000


@pytest.mark.parametrize("source", ["{{ '{0.__class__}'.format(1) }}", "{{ '{a.__class__}'.format_map({'a': 1}) }}"])
def test_formats_do_not_lead_out(source: str) -> None:
    assert "int" not in environment(datetime.now).from_string(source).render()
