"""`mode=merge` and what it says."""

from __future__ import annotations

from pathlib import Path

from batchrun.config import Config
from batchrun.data.merge import merge_parts


def merge(config: Config) -> int:
    """Merge the parts of a finished job into another folder, and say so."""
    folder, target = (Path(str(path)).expanduser() for path in (config.output.path, config.output.merge_path))
    output = config.output
    merged = merge_parts(folder, target, output.merge_mib, output.compression, output.merge_unique)
    print(f"{merged.parts:,} parts of {folder} are {merged.files:,} files in {target}; {folder} is as it was")
    if output.merge_unique:
        print(f"{merged.left_out:,} rows are left out: their completions equal those of rows before them")
    return 0
