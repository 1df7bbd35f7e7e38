"""Arguments of a kernel under test: seeded contents, guard zones around them, comparison of outputs.

Needs numpy; free of any TVM version. Python 3.10.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

_ALIGNMENT = 64
_GUARD_BYTES = 256
_GUARD_VALUE = 0xA5

#: Largest difference from the default schedule's output that another order of the same arithmetic
#: explains, as a share of the output's largest magnitude. A reduction over K float32 terms errs by
#: about sqrt(K) * 6e-8, and Winograd transforms by ten times that; 1e-3 is far above both and far
#: below what a wrong index or a race leaves. Integers of few bits may differ by one step of rounding.
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
#: Eight bits, and the sixteen in which kernels pass quantised numbers on.
_QUANTISED = ("int8", "uint8", "int16")


class WrongOutput(Exception):
    """A candidate's output differs from the default schedule's, or it wrote outside its buffers."""


class GuardedArray:
    """An array between two guard zones that show a write out of bounds."""

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        kind = _dtype_of(dtype)
        size_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        self._store = np.full(size_bytes + 2 * _GUARD_BYTES + _ALIGNMENT, _GUARD_VALUE, dtype=np.uint8)
        start = _GUARD_BYTES + (-(self._store.ctypes.data + _GUARD_BYTES) % _ALIGNMENT)
        self._before = self._store[start - _GUARD_BYTES : start]
        self._after = self._store[start + size_bytes : start + size_bytes + _GUARD_BYTES]
        self.array: Array = self._store[start : start + size_bytes].view(kind).reshape(shape)

    def fill(self, seed: int) -> None:
        """Seeded contents without zeros, infinities or indices that could leave a table."""
        generator = np.random.default_rng(seed)
        kind = self.array.dtype
        if kind.name in TOLERANCE:
            self.array[...] = generator.uniform(0.1, 1.0, self.array.shape).astype(kind)
        elif kind.name in _QUANTISED:
            info = np.iinfo("int8" if kind.itemsize > 1 else kind.name)
            self.array[...] = generator.integers(info.min, info.max, self.array.shape, endpoint=True, dtype=kind)
        else:
            # Wider integers are mostly indices or sizes: 0 and 1 are inside every table of two rows.
            self.array[...] = generator.integers(0, 2, self.array.shape).astype(kind)

    def check_guards(self, name: str) -> None:
        """Raises WrongOutput where a guard zone has changed."""
        if (self._before != _GUARD_VALUE).any() or (self._after != _GUARD_VALUE).any():
            raise WrongOutput(f"the candidate wrote outside the buffer of argument {name}")


def _dtype_of(name: str) -> np.dtype[np.generic]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # what numpy itself does not know, bfloat16 first

        known: np.dtype[np.generic] = np.dtype(getattr(ml_dtypes, name))
        return known


def seed_of(name: str) -> int:
    """A seed that depends on ``name`` alone."""
    return zlib.crc32(name.encode())


def compare(expected: Sequence[Array], actual: Sequence[Array]) -> None:
    """Raises WrongOutput where ``actual`` is not ``expected`` within the tolerance of its dtype."""
    for index, (want, got) in enumerate(zip(expected, actual)):  # noqa: B905 - Python 3.9 has no strict
        if want.dtype.name not in TOLERANCE:
            difference = np.abs(want.astype(np.int64) - got.astype(np.int64))
            # So few bits are mostly a requantisation, which may round the other way; an index or a truth may not.
            limit = 1.0 if want.dtype.name in _QUANTISED else 0.0
        else:
            want64, got64 = want.astype(np.float64), got.astype(np.float64)
            same = (want64 == got64) | (np.isnan(want64) & np.isnan(got64))
            with np.errstate(invalid="ignore"):
                difference = np.where(same, 0.0, np.abs(want64 - got64))
            finite = np.abs(want64[np.isfinite(want64)])
            limit = TOLERANCE[want.dtype.name] * max(float(finite.max(initial=0.0)), 1e-6)
        worst = float(difference.max(initial=0.0))
        if not worst <= limit:
            raise WrongOutput(
                f"output {index} differs from the default schedule's by {worst:.3g}, allowed is {limit:.3g}"
            )
