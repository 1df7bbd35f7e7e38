"""What is done to a model before its operators are fused: each pass in a file of its own."""

from __future__ import annotations

from typing import Any

from tasks.engines.relax.passes.affine_after import affine_after
from tasks.engines.relax.passes.affine_before import affine_before
from tasks.engines.relax.passes.affine_chains import affine_chains
from tasks.engines.relax.passes.clip_bounds import clip_bounds
from tasks.engines.relax.passes.concats import concats
from tasks.engines.relax.passes.plain_arithmetic import plain_arithmetic
from tasks.engines.relax.passes.sums import sums

_ONCE = (clip_bounds, plain_arithmetic, sums)
#: Each makes work for the others: what one folds, the next finds beside a conv.
_REPEATED = (affine_chains, affine_after, affine_before)
#: Rounds of the repeated passes; each link of a chain takes one. PP-OCR's recogniser takes five.
_ROUNDS = 16


def simplify(mod: Any) -> Any:
    """``mod`` with less arithmetic in ``main``; the same function but for rounding."""
    for once in _ONCE:
        mod, _ = once(mod)
    for _ in range(_ROUNDS):
        changes = 0
        for repeated in _REPEATED:
            mod, changed = repeated(mod)
            changes += changed
        if not changes:
            break
    mod, _ = concats(mod)
    return mod
