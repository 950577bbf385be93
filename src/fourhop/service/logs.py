"""Log lines: one line an event, `key=value`, readable by people and by `grep`.

2026-01-31T12:00:00.123Z info fourhop.router request request_id=abc prefill=http://127.0.0.1:8101 status=200
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]

NOISY = ("asyncio", "uvicorn", "aiohttp", "httpx", "filelock", "huggingface_hub")
"""Other people's chatter: it stays out of our log unless someone debugs."""


def configure(level: LogLevel) -> None:
    """Send this process's log to stderr. Called once, by the command line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    if level != "debug":
        for name in NOISY:
            logging.getLogger(name).setLevel("WARNING")


class LineFormatter(logging.Formatter):
    """Time in UTC with milliseconds, level, logger, message; control characters of the message are escaped."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 (logging's name)
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        message = _escape_controls(record.message)
        return f"{self.formatTime(record)} {record.levelname.lower()} {record.name} {message}"

    def usesTime(self) -> bool:  # noqa: N802 (logging's name)
        return False


def event(name: str, **fields: object) -> str:
    """A message: the event's name, then `key=value` for each field that is not None. Floats get four digits."""
    return " ".join([name, *(f"{key}={_value(value)}" for key, value in fields.items() if value is not None)])


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    text = _escape_controls(str(value))
    if text and not any(character in text for character in ' "='):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _escape_controls(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
