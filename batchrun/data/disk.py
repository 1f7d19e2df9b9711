"""What the guarantees need of a file system: durable writes, whole replacements, errors that name a remedy."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchrun.errors import BatchrunError

TEMPORARY = ".tmp"
FOREIGN_TEMP_AGE_S = 24 * 3600.0

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


def temporary(target: Path) -> Path:
    """A hidden name beside `target` that tells whose it is and that nobody else uses."""
    return target.with_name(f".{target.name}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}{TEMPORARY}")


def is_temporary(name: str) -> bool:
    """Whether a file of this name was made under a name from `temporary`."""
    return name.startswith(".") and name.endswith(TEMPORARY)


def remove_stale(path: Path) -> None:
    """Remove a temporary file or folder whose process is gone: on this host by its id, on another by a day's age."""
    host, _, pid = path.name.removesuffix(TEMPORARY).rpartition("-")[0].rpartition("-")
    try:
        if host.endswith(f".{socket.gethostname()}"):
            stale = pid.isdigit() and (int(pid) == os.getpid() or not alive(int(pid)))
        else:
            stale = time.time() - path.stat().st_mtime > FOREIGN_TEMP_AGE_S
        if stale and path.is_dir():
            shutil.rmtree(path)
        elif stale:
            path.unlink()
    except FileNotFoundError:
        return


def replace_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a small JSON file as a whole. Its folder must be there. Raises OSError."""
    written = temporary(path)
    try:
        written.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", errors="replace")
        os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)


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
