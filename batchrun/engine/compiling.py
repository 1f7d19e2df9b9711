"""Says that kernels for the CPU are being compiled, so that nobody takes a first run for one that hangs.

Later runs of the installation find them in numba's cache, beside the source or in $NUMBA_CACHE_DIR.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from numba.core import event

log = logging.getLogger(__name__)


class _Teller(event.Listener):
    """Hears what numba compiles, which is nothing that was in its cache; speaks once."""

    def __init__(self) -> None:
        self.told = False

    def on_start(self, _: Any) -> None:
        if not self.told:
            self.told = True
            log.info("compiling kernels for this processor: a minute or two, once for each installation")

    def on_end(self, _: Any) -> None:
        pass


_teller = _Teller()


@cache
def tell_of_compiling() -> None:
    """From now on log the first time that numba compiles something in this process."""
    event.register("numba:compile", _teller)
