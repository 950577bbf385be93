"""Command-line flags from frozen config dataclasses, so that each name, default and description stands in one place."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import docstring_parser
import msgspec
from cyclopts import Group, Parameter, Token

from fourhop.wire.errors import StartError, client_error

T = TypeVar("T")


class UsageError(Exception):
    """The command line asks for something that cannot be; one line."""


def with_flags(function: Callable[..., T]) -> Callable[..., T]:
    """The command with each config among its parameters replaced by that config's fields, as flags.

    A flag given once reaches every config that has a field of its name; help shows it with the first of them. A value
    that is a mapping or a msgspec struct is given as JSON.
    """
    own = inspect.signature(function)
    hints = typing.get_type_hints(function, include_extras=True)
    configs = {name: hints[name] for name in own.parameters if dataclasses.is_dataclass(hints[name])}
    flags: dict[str, inspect.Parameter] = {}
    for place, (name, parameter) in enumerate(own.parameters.items()):
        for flag in _flags(configs[name], place) if name in configs else [_own_flag(parameter, hints[name])]:
            flags.setdefault(flag.name, flag)
    signature = inspect.Signature(list(flags.values()))

    @functools.wraps(function)
    def command(*args: Any, **given: Any) -> T:
        bound = signature.bind(*args, **given)
        bound.apply_defaults()
        values = bound.arguments
        call = inspect.BoundArguments(
            own,
            {name: _build(configs[name], values) if name in configs else values[name] for name in own.parameters},
        )
        return function(*call.args, **call.kwargs)

    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: flag.annotation for name, flag in flags.items()}
    return command


def _build(config: type, values: Mapping[str, Any]) -> Any:
    try:
        return config(**{field.name: values[field.name] for field in dataclasses.fields(config)})
    except (ValueError, StartError) as error:
        raise UsageError(str(error)) from None


def _own_flag(parameter: inspect.Parameter, hint: Any) -> inspect.Parameter:
    """The command's own parameter, with what its `Annotated` says."""
    bare, *said = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    annotation: Any = Annotated[(_flag_type(bare), _json_parameter(bare), *said)]
    return parameter.replace(annotation=annotation)


def _flags(config: type, place: int) -> Iterator[inspect.Parameter]:
    """A keyword for every field: its help from the class's docstring, its group named after the class."""
    hints = typing.get_type_hints(config)
    described = docstring_parser.parse(inspect.getdoc(config) or "")
    help_of = {param.arg_name: param.description for param in described.params}
    title, about = config.__name__.removesuffix("Config"), described.short_description or ""
    group = Group(title, help=about, sort_key=place)
    for field in dataclasses.fields(config):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        shown = Parameter(
            help=help_of.get(field.name),
            group=group,
            env_var=field.metadata.get("env_var"),
            show_default=default not in (None, (), {}),
            negative_iterable=(),
            consume_multiple=field.metadata.get("consume_multiple"),
        )
        hint = hints[field.name]
        annotation: Any = Annotated[_flag_type(hint), _json_parameter(hint), shown]
        yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _is_json(hint: Any) -> bool:
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, type(int | None)) else (hint,)
    return any(
        typing.get_origin(part) is Mapping or (isinstance(part, type) and issubclass(part, msgspec.Struct))
        for part in parts
    )


def _flag_type(hint: Any) -> Any:
    """JSON is read here, and not for pydantic to check: cyclopts would have it do so where some part has loaded it."""
    return Any if _is_json(hint) else hint


def _json_parameter(hint: Any) -> Parameter:
    return Parameter(converter=_json_converter(hint), metavar="JSON") if _is_json(hint) else Parameter()


def _json_converter(hint: Any) -> Callable[[Any, Sequence[Token]], Any]:
    """A flag's JSON text as a value of the hint. What is wrong is told with the field's path."""

    def convert(_: Any, tokens: Sequence[Token]) -> Any:
        try:
            return msgspec.json.decode(tokens[0].value, type=hint)
        except msgspec.ValidationError as error:
            wrong = client_error(error)
            raise ValueError(f"{wrong.param}: {wrong.message}" if wrong.param else wrong.message) from None
        except msgspec.DecodeError as error:
            raise ValueError(f"not JSON: {error}") from None

    return convert
