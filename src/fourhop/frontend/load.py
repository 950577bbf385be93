"""Everything a frontend reads at its start."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import datetime

from fourhop.checkpoint import Checkpoint
from fourhop.frontend import parsers
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.environment import Clock
from fourhop.frontend.model import load_model
from fourhop.frontend.parsers.detect import Signs, detect
from fourhop.frontend.parsers.plugins import Catalog, load_catalog
from fourhop.frontend.render import Renderer
from fourhop.frontend.template import load_templates
from fourhop.frontend.tokenizer import Tokenizer
from fourhop.wire.errors import StartError

log = logging.getLogger("fourhop.frontend")


def load_renderer(checkpoint: Checkpoint, config: FrontendConfig, *, clock: Clock = datetime.now) -> Renderer:
    """The renderer of a checkpoint; its config names the parsers. Raises StartError with one line that says what is
    wrong with the files or the parsers."""
    renderer, choice = _load(checkpoint, config, clock)
    log.info(choice)
    return renderer


def check(checkpoint: Checkpoint, config: FrontendConfig) -> None:
    """Raise the StartError that `load_renderer` would: for those who have engines to start in between."""
    _load(checkpoint, config, datetime.now)


def _load(checkpoint: Checkpoint, config: FrontendConfig, clock: Clock) -> tuple[Renderer, str]:
    """The renderer, and how its parsers were chosen."""
    tokenizer = Tokenizer.load(checkpoint.folder)
    templates = load_templates(checkpoint.folder, tokenizer.special_tokens, override=config.chat_template, clock=clock)
    catalog = load_catalog(config.parser_plugin)
    config, choice = _with_parsers(config, templates.source, catalog)
    renderer = Renderer(
        config=config,
        model=load_model(checkpoint, config),
        tokenizer=tokenizer,
        templates=templates,
        parsers=parsers.find(config.reasoning_parser, config.tool_call_parser, tokenizer, catalog),
    )
    return renderer, choice


def _with_parsers(config: FrontendConfig, template: str, catalog: Catalog) -> tuple[FrontendConfig, str]:
    """The config with the parsers that it leaves open, told from the chat template; and one log line about it."""
    reasoning, how_reasoning = _choose(config.reasoning_parser, template, catalog.reasoning_signs)
    tool, how_tool = _choose(config.tool_call_parser, template, catalog.tool_signs)
    if config.enable_auto_tool_choice and tool == "none":
        raise StartError("enable_auto_tool_choice needs a tool_call_parser: the chat template shows none that is known")
    choice = f"reasoning parser: {reasoning} ({how_reasoning}), tool call parser: {tool} ({how_tool})"
    calls = tool != "none" if config.enable_auto_tool_choice is None else config.enable_auto_tool_choice
    chosen = replace(config, reasoning_parser=reasoning, tool_call_parser=tool, enable_auto_tool_choice=calls)
    return chosen, choice


def _choose(named: str | None, template: str, signs: Signs) -> tuple[str, str]:
    """The parser, and how it was chosen."""
    if named is not None:
        return named, "named"
    found = detect(template, signs)
    return (found, "from the chat template") if found else ("none", "the chat template shows none that is known")
