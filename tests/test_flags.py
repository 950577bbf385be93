"""Flags derive from dataclasses: names, help, defaults, JSON values, and flags that several configs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from cyclopts import App, CycloptsError

from fourhop.flags import UsageError, with_flags


class Transfer(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    port: int = 0


@dataclass(frozen=True)
class CookConfig:
    """How to cook.

    Attributes:
        heat: Degrees.
        salt: Add salt.
        names: Who eats.
        extra: More, as an object.
    """

    heat: int = 180
    salt: bool = True
    names: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.heat > 300:
            raise ValueError(f"heat must be at most 300, not {self.heat}")


@dataclass(frozen=True)
class ServeConfig:
    heat: int = 180
    plates: int | None = None


def run(*arguments: str) -> dict[str, Any]:
    got: dict[str, Any] = {}

    def dinner(
        dish: str = "soup", /, *, cook: CookConfig, serve: ServeConfig, transfer: Transfer | None = None
    ) -> None:
        got.update(dish=dish, cook=cook, serve=serve, transfer=transfer)

    app = App(name="kitchen")
    app.command(with_flags(dinner))
    app(["dinner", *arguments], exit_on_error=False, print_error=False, result_action="return_value")
    return got


def test_without_flags_every_config_is_its_default() -> None:
    assert run() == {"dish": "soup", "cook": CookConfig(), "serve": ServeConfig(), "transfer": None}


def test_flags_reach_their_fields_and_shared_ones_all_of_them() -> None:
    got = run("stew", "--heat", "90", "--no-salt", "--names", "a", "--names", "b", "--plates", "2")
    assert got["dish"] == "stew"
    assert got["cook"] == CookConfig(heat=90, salt=False, names=("a", "b"))
    assert got["serve"] == ServeConfig(heat=90, plates=2)


def test_a_library_that_some_other_part_loaded_changes_nothing() -> None:
    """cyclopts has values checked by pydantic where that is loaded, as a client library does."""
    pytest.importorskip("pydantic")
    test_without_flags_every_config_is_its_default()
    test_json_values_keep_their_types()


def test_json_values_keep_their_types() -> None:
    got = run("--extra", '{"a": {"b": [false, 1]}}', "--transfer", '{"kind": "shm"}')
    assert got["cook"].extra == {"a": {"b": [False, 1]}}
    assert got["transfer"] == Transfer("shm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--transfer", '{"kind": "shm", "prot": 1}'), "prot"),
        (("--transfer", '{"kind": "shm", "port": "x"}'), "port: Expected `int`, got `str`"),
        (("--transfer", "{kind}"), "not JSON"),
        (("--extra", "[]"), "Expected `object`"),
        (("--plates", "two"), "--plates"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--empty-names",), "--empty-names"),
    ],
)
def test_a_wrong_flag_is_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(CycloptsError) as caught:
        run(*arguments)
    assert message in str(caught.value)


def test_what_a_config_refuses_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="heat must be at most 300, not 301"):
        run("--heat", "301")


def test_help_tells_what_the_docstring_tells(capsys: pytest.CaptureFixture[str]) -> None:
    run("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "Cook" in text and "How to cook." in text
    assert "Degrees. [default: 180]" in text
    assert text.count("--heat") == 1
    assert "--transfer JSON" in text
    assert "[default: ()]" not in text and "[default: {}]" not in text
