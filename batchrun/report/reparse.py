"""`mode=reparse` and what it says."""

from __future__ import annotations

from pathlib import Path

from batchrun.config import Config
from batchrun.data.reparse import reparse_parts


def reparse(config: Config) -> int:
    """Parse the completions of an output anew, and say what came of it."""
    folder = Path(str(config.output.path)).expanduser()
    done = reparse_parts(folder, config.output)
    print(f"{done.made:,} of {done.parts:,} parts of {folder} made anew, with {done.rows:,} rows")
    if done.errors:
        print(f"{done.errors:,} completions do not parse: the column parse_error says why")
    return 0
