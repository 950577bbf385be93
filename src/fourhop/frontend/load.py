"""Everything a frontend reads at its start."""

from __future__ import annotations

from datetime import datetime

from fourhop.checkpoint import Checkpoint
from fourhop.frontend import parsers
from fourhop.frontend.config import FrontendConfig
from fourhop.frontend.environment import Clock
from fourhop.frontend.model import load_model
from fourhop.frontend.render import Renderer
from fourhop.frontend.template import load_templates
from fourhop.frontend.tokenizer import Tokenizer


def load_renderer(checkpoint: Checkpoint, config: FrontendConfig, *, clock: Clock = datetime.now) -> Renderer:
    """The renderer of a checkpoint. Raises StartError with one line that says what is wrong with its files."""
    tokenizer = Tokenizer.load(checkpoint.folder)
    return Renderer(
        config=config,
        model=load_model(checkpoint, config),
        tokenizer=tokenizer,
        templates=load_templates(
            checkpoint.folder, tokenizer.special_tokens, override=config.chat_template, clock=clock
        ),
        parsers=parsers.find(config.reasoning_parser, config.tool_call_parser, tokenizer),
    )
