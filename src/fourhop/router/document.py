"""Files that an operator writes: JSON, or TOML where the name ends so."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

from fourhop.wire.errors import StartError, client_error

T = TypeVar("T")


def read_document(path: Path, form: type[T]) -> T:
    """What the file says, as `form`. Raises StartError, one line that names the file and what is wrong in it."""
    try:
        raw = path.read_bytes()
        text = msgspec.json.encode(tomllib.loads(raw.decode())) if path.suffix == ".toml" else raw
        return msgspec.json.decode(text, type=form)
    except OSError as error:
        raise StartError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        wrong = client_error(error)
        raise StartError(f"{path}: {wrong.param or 'the whole'}: {wrong.message}") from None
    except (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartError(f"{path}: {error}") from None
