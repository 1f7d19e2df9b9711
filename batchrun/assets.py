"""Where things that ship with batchrun lie, and where it keeps what it downloads and builds."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

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


def build_once(target: Path, build: Callable[[Path, Path], None]) -> Path:
    """`target`, which `build(scratch, product)` makes if it is not there: a file or folder at `product`.

    It is built under a scratch name and renamed, one process at a time: a killed or a second one does no harm.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if target.exists():
            return target
        print(f"preparing {target} (once)", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as folder:
            scratch, product = Path(folder, "scratch"), Path(folder, target.name)
            scratch.mkdir()
            build(scratch, product)
            os.replace(product, target)
    return target
