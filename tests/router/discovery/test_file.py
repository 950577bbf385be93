"""A file of engines: what is accepted, what is told of one that is not, and when it is read."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fourhop.router.discovery.file import FileSource, read_engines
from fourhop.router.discovery.source import SourceError
from fourhop.wire.errors import StartError

GOOD = '{"prefill": ["http://a:1"], "decode": ["http://b:1", "http://c:1"]}'


def test_json_and_toml_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "engines.json").write_text(GOOD)
    (tmp_path / "engines.toml").write_text('prefill = ["http://a:1"]\ndecode = ["http://b:1", "http://c:1"]')
    wanted = {"http://a:1": "prefill", "http://b:1": "decode", "http://c:1": "decode"}
    assert read_engines(tmp_path / "engines.json") == read_engines(tmp_path / "engines.toml") == wanted


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("e.json", "", "e.json: Input data was truncated"),
        ("e.json", '{"prefil": ["http://a"]}', "prefil"),
        ("e.json", '{"prefill": "http://a"}', "prefill: Expected `array`, got `str`"),
        ("e.json", "[]", "the whole: Expected `object`, got `array`"),
        ("e.json", "{}", "lists no engine"),
        ("e.json", '{"prefill": ["http://a:99999"]}', "e.json: not the URL of an engine: http://a:99999"),
        ("e.json", '{"prefill": ["http://[::1"]}', "not the URL of an engine"),
        ("e.json", '{"decode": ["http://a..b"]}', "not the URL of an engine"),
        ("e.json", '{"prefill": ["http://a"], "decode": ["http://a"]}', "one role only: http://a is listed twice"),
        ("e.toml", "", "lists no engine"),
        ("e.toml", "prefill = [", "e.toml: "),
    ],
)
def test_a_bad_file_is_told_in_one_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(StartError, match=message) as wrong:
        FileSource(path)
    assert "\n" not in str(wrong.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot read"):
        FileSource(tmp_path / "none.json")
    (tmp_path / "e.toml").write_bytes(b"\xff")
    with pytest.raises(StartError, match=r"e\.toml: "):
        FileSource(tmp_path / "e.toml")


def test_it_is_read_when_it_changes_and_as_long_as_it_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(GOOD)
    os.utime(path, ns=(0, 1))

    async def scenario() -> None:
        source = FileSource(path)
        raw = path.read_bytes()
        path.write_bytes(raw.replace(b"http://a:1", b"http://d:1"))
        os.utime(path, ns=(0, 1))
        await source.look()
        assert "http://a:1" in source.engines, "nothing showed that it changed"
        os.utime(path, ns=(0, 2))
        await source.look()
        assert "http://d:1" in source.engines

        path.write_text("{")
        os.utime(path, ns=(0, 3))
        for _ in range(2):
            with pytest.raises(SourceError, match=r"e\.json: "):
                await source.look()
        assert "http://d:1" in source.engines
        path.write_bytes(raw)
        os.utime(path, ns=(0, 3))
        await source.look()
        assert "http://a:1" in source.engines

        replaced = tmp_path / "new"  # another file in its place, as a ConfigMap changes
        replaced.write_bytes(raw.replace(b"http://a:1", b"http://e:1"))
        os.utime(replaced, ns=(0, 3))
        replaced.rename(path)
        await source.look()
        assert "http://e:1" in source.engines

    asyncio.run(scenario())
