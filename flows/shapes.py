"""Input shapes as people write them, in options and in tags."""

from __future__ import annotations

from collections.abc import Iterable

from tasks.errors import InputError


def parse_shapes(texts: Iterable[str], where: str = "--shape") -> dict[str, tuple[int, ...]]:
    """``name=1,3,48,320`` by input name; ``where`` they were written is for the error. Raises InputError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        try:
            shapes[name] = tuple(int(size) for size in sizes.split(",")) if sizes else ()
        except ValueError:
            name = ""
        if not name:
            raise InputError(f"{where} {text} is not NAME=SIZE,SIZE,...: for example {where} x=1,3,48,320")
    return shapes
