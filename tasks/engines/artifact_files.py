"""What every artifact has beside its library: the manifest, and the digest that names it in the store.

Standard library only, Python 3.10.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.engines.interface import BuildRequest
from tasks.engines.wire import to_plain
from tasks.records import SubgraphChoice

MANIFEST_VERSION = 1


def manifest_of(request: BuildRequest, choices: Sequence[SubgraphChoice]) -> dict[str, Any]:
    """The manifest of what is built for ``request``."""
    imported = request.fused.imported
    return {
        "manifest_version": MANIFEST_VERSION,
        "model": {
            "name": imported.model.name,
            "source": imported.model.source,
            "digest": imported.model.digest,
        },
        "engine": imported.engine.engine,
        "versions": imported.engine.versions,
        "target": to_plain(imported.engine.target),
        "threads": imported.engine.target.threads,
        "granularity": request.fused.granularity,
        "tuned": request.tuned,
        "inputs": to_plain(imported.inputs),
        "outputs": to_plain(imported.outputs),
        "subgraphs": to_plain(tuple(choices)),
    }


def digest_of(folder: Path) -> str:
    """sha256 over the names and contents of the artifact's files."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
