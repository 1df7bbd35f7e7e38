"""Records and errors as JSON: how a parent and an engine child talk, and how records are stored.

Standard library only, Python 3.10. One JSON object a line. A request is ``{"id", "verb", "wire",
"args"}``; an event is ``{"event", "data"}``; the reply to a request is ``{"id", "result"}`` or
``{"id", "error": {"type", "message", "detail"}}``.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, Union

from tasks import errors

WIRE_VERSION = 1

T = TypeVar("T")
#: What JSON gives for each plain type; a whole number may stand for a float.
_PLAIN: dict[Any, tuple[type, ...]] = {str: (str,), int: (int,), float: (int, float), bool: (bool,)}
_hints: dict[type, dict[str, Any]] = {}


def to_plain(value: Any) -> Any:
    """``value`` as JSON types: a dataclass becomes a dict, a tuple a list."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    return value


def to_line(value: Any) -> str:
    """``value`` as one line of JSON, newline included."""
    return json.dumps(to_plain(value), separators=(",", ":"), allow_nan=False) + "\n"


def from_plain(cls: type[T], value: Any) -> T:
    """``value`` (JSON types) as an instance of ``cls``; fields that ``cls`` does not know are dropped.

    Raises ValueError where a field is missing or of another kind.
    """
    try:
        return typing.cast(T, _convert(cls, value))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a {cls.__name__}: {error}") from error


def from_line(cls: type[T], line: str | bytes) -> T:
    """One line of JSON as an instance of ``cls``. Raises ValueError."""
    return from_plain(cls, json.loads(line))


def error_to_plain(error: BaseException, detail: str = "") -> dict[str, str]:
    """``error`` as a reply; one that is not ours arrives as an EngineError."""
    known = isinstance(error, errors.TunewrightError)
    name = type(error).__name__ if known else "EngineError"
    message = str(error) if known else f"{type(error).__name__}: {error}"
    return {"type": name, "message": message, "detail": detail}


def error_from_plain(plain: Mapping[str, str]) -> errors.TunewrightError:
    """The exception that ``plain`` describes, with the engine's traceback as its note."""
    cls = errors.all_errors().get(plain.get("type", ""), errors.EngineError)
    error = cls(plain.get("message", "the engine gave no reason"))
    error.__dict__["detail"] = plain.get("detail", "")
    return error


def _convert(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        return _convert(inner[0], value)
    if origin in (tuple, list):
        item = typing.get_args(kind)[0]
        return (tuple if origin is tuple else list)(_convert(item, part) for part in value)
    if origin is dict:
        item = typing.get_args(kind)[1]
        return {key: _convert(item, part) for key, part in value.items()}
    if dataclasses.is_dataclass(kind):
        return _convert_record(typing.cast(type, kind), value)
    allowed = _PLAIN.get(kind)
    if allowed is not None and (not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool)):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _convert_record(cls: type, value: Mapping[str, Any]) -> Any:
    hints = _hints.get(cls)
    if hints is None:
        hints = _hints[cls] = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls) if f.init}
    return cls(**{k: _convert(hints[k], v) for k, v in value.items() if k in names})
