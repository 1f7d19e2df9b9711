"""What the guarantees need of a file system: durable writes, whole replacements, errors that name a remedy."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchrun.errors import BatchrunError

REMEDIES = {
    errno.ENOENT: "it was removed while the job ran",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of the quota",
    errno.EFBIG: "raise the limit on file sizes",
    errno.EACCES: "check its permissions, or use another output.path",
    errno.EPERM: "check its permissions, or use another output.path",
    errno.EROFS: "use an output.path that can be written",
    errno.EEXIST: "a file is in the way: use another output.path",
    errno.ENOTDIR: "a file is in the way: use another output.path",
}


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an error of the file system into a message with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "check the disk that holds output.path")
        raise BatchrunError(
            f"cannot write {path}: {error}: {remedy}. Finished parts are kept, and the same command goes on from them"
        ) from error


def sync(path: Path) -> None:
    """fsync of a file or a folder: after it, a power cut does not undo what was written or renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a small JSON file as a whole. Its folder must be there. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", errors="replace")
    os.replace(temporary, path)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None if the file is not there or holds something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def alive(pid: int) -> bool:
    """Whether there is such a process on this host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
