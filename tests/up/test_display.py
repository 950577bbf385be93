"""What `up` prints, with and without a terminal."""

from __future__ import annotations

import io
import json
import shlex

from fourhop.up.display import Display, summary
from fourhop.up.plan import EnginePlan

PLAN = EnginePlan("decode-0", "decode", "http://127.0.0.1:8101", (1,), ())
LOADING = "2026-01-01T00:00:00.000Z info fourhop.service.progress loading percent=40"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_are_plain_lines() -> None:
    stream = io.StringIO()
    display = Display([PLAN], stream)
    with display:
        display.line("decode-0", LOADING)
        display.ready("decode-0")
    display.line("decode-0", "[bold]not markup[/bold] " + "x" * 200)
    assert stream.getvalue().splitlines() == [
        f"decode-0 | {LOADING}",
        "decode-0 | ready",
        "decode-0 | [bold]not markup[/bold] " + "x" * 200,
    ]


def test_on_a_terminal_loading_moves_a_bar() -> None:
    stream = Terminal()
    display = Display([PLAN], stream)
    with display:
        display.line("decode-0", LOADING)
        display.line("decode-0", "a warning")
        display.ready("decode-0")
    text = stream.getvalue()
    assert "decode-0 | a warning" in text
    assert "loading percent" not in text
    assert "100 %  ready" in text


def test_the_summary_ends_with_a_command_to_copy() -> None:
    text = summary("http://127.0.0.1:8000", "it's", [PLAN], {"decode-0": 12}, 11, "shm")
    assert "  decode-0         http://127.0.0.1:8101    pid 12       core 1" in text.splitlines()
    program, url, *_, body = shlex.split(text.splitlines()[-1])
    assert (program, url) == ("curl", "http://127.0.0.1:8000/v1/chat/completions")
    assert json.loads(body)["model"] == "it's"
