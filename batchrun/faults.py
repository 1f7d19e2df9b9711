"""Named points at which crash tests kill the process."""

from __future__ import annotations

import os
import signal

_hits: dict[str, int] = {}


def fault(name: str) -> None:
    """Die here by SIGKILL if BATCHRUN_FAULT is `name`, or at the n-th time if it is `name:n`."""
    wanted, _, nth = os.environ.get("BATCHRUN_FAULT", "").partition(":")
    if wanted != name:
        return
    _hits[name] = _hits.get(name, 0) + 1
    if _hits[name] >= int(nth or 1):
        os.kill(os.getpid(), signal.SIGKILL)
