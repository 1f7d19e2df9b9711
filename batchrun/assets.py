"""Where things that ship with batchrun lie, and where it keeps what it downloads."""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def asset(name: str) -> Path:
    """The folder `conf` or `jobs`: inside the package when installed from a wheel, beside it in a checkout.

    Raises FileNotFoundError when it is in neither place.
    """
    packaged = PACKAGE / f"_{name}"
    folder = packaged if packaged.is_dir() else PACKAGE.parent / name
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder {name} is neither at {packaged} nor at {folder}: install batchrun again")
    return folder


def cache_folder() -> Path:
    """The user's cache of models and data: $BATCHRUN_CACHE, else batchrun/ in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("BATCHRUN_CACHE"):
        return Path(own).expanduser().absolute()
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification tells programs to ignore a relative folder.
    return (home if home.is_absolute() else Path.home() / ".cache") / "batchrun"
