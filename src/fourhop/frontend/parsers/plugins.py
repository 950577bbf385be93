"""Families that come from outside: `--parser-plugin module:attribute`, or the entry-point group `fourhop.parsers`.

Either names a `Plugin`. Its families are tables like those in `families`, over the bodies of this package or its own
(`table.Body`); names that fourhop has already mean the plugin's family.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

from fourhop.frontend.parsers.detect import REASONING_SIGNS, TOOL_SIGNS, Signs
from fourhop.frontend.parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from fourhop.frontend.parsers.table import ReasoningFamily, ToolFamily
from fourhop.wire.errors import StartError

GROUP = "fourhop.parsers"


@dataclass(frozen=True)
class Plugin:
    """Families by name, and by name the texts that tell a chat template of the family (`detect`)."""

    reasoning: Mapping[str, ReasoningFamily] = field(default_factory=dict)
    tools: Mapping[str, ToolFamily] = field(default_factory=dict)
    reasoning_signs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tool_signs: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Catalog:
    """All families that a server knows. A name that maps to None means no parser."""

    reasoning: Mapping[str, ReasoningFamily | None] = field(default_factory=lambda: REASONING_FAMILIES)
    tools: Mapping[str, ToolFamily | None] = field(default_factory=lambda: TOOL_FAMILIES)
    reasoning_signs: Signs = field(default_factory=lambda: REASONING_SIGNS)
    tool_signs: Signs = field(default_factory=lambda: TOOL_SIGNS)

    def extend(self, plugin: Plugin) -> Catalog:
        return Catalog(
            {**self.reasoning, **plugin.reasoning},
            {**self.tools, **plugin.tools},
            {**self.reasoning_signs, **{name: frozenset(texts) for name, texts in plugin.reasoning_signs.items()}},
            {**self.tool_signs, **{name: frozenset(texts) for name, texts in plugin.tool_signs.items()}},
        )


def load_catalog(named: Sequence[str] = ()) -> Catalog:
    """Our families, those of installed packages, then those of the plugins `named` as `module:attribute`.

    Raises StartError for a plugin that cannot be imported or is none.
    """
    catalog = Catalog()
    for entry in [*_installed(), *(_entry(name) for name in named)]:
        catalog = catalog.extend(_load(entry))
    return catalog


def _installed() -> Iterator[EntryPoint]:
    yield from sorted(entry_points(group=GROUP), key=lambda entry: entry.name)


def _entry(name: str) -> EntryPoint:
    module, separator, attribute = name.partition(":")
    if not (module and separator and attribute):
        raise StartError(f"the parser plugin {name} is not of the form module:attribute")
    return EntryPoint(name=name, value=name, group=GROUP)


def _load(entry: EntryPoint) -> Plugin:
    module, _, attribute = entry.value.partition(":")
    try:
        plugin = getattr(importlib.import_module(module.strip()), attribute.strip())
    except (ImportError, AttributeError) as error:
        raise StartError(f"the parser plugin {entry.name} cannot be loaded: {error}") from None
    if not isinstance(plugin, Plugin):
        raise StartError(f"the parser plugin {entry.name} is a {type(plugin).__name__}, not a Plugin")
    return plugin
