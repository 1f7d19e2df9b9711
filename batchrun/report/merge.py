"""`mode=merge` and what it says."""

from __future__ import annotations

from pathlib import Path

from batchrun.config import Config
from batchrun.data.merge import merge_parts


def merge(config: Config) -> int:
    """Merge the parts of a finished job into another folder, and say so."""
    folder, target = (Path(str(path)).expanduser() for path in (config.output.path, config.output.merge_path))
    parts, files = merge_parts(folder, target, config.output.merge_mib, config.output.compression)
    print(f"{parts:,} parts of {folder} are {files:,} files in {target}; {folder} is as it was")
    return 0
