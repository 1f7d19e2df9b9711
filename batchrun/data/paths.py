"""From `input.path` to a sorted list of files: folders, globs, braces."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Sequence

from batchrun.errors import InputError

URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
BRACES = re.compile(r"\{([^{}]*)\}")
HIDDEN = ("_", ".")
NUMBERS = re.compile(r"^(\d+)\.\.(\d+)$")


def find_files(paths: Sequence[str], suffix: str) -> list[str]:
    """Absolute paths of all files that `paths` name, sorted, each once.

    A path is a file, a folder (searched to any depth for `suffix`), or a glob with `**`, `{a,b}` and `{00..12}`;
    a file or folder that exists under the literal name wins over its reading as a pattern. Names that begin with
    `_` or `.` are skipped in folders and by wildcards. Raises InputError for a path that finds nothing.
    """
    if not paths:
        raise InputError("input.path is empty: give a file, a folder, a glob or a list of them")
    found: set[str] = set()
    for path in paths:
        if URL.match(path):
            raise InputError(f"input.path={path} is a URL, and only local files can be read: copy or mount it first")
        path = os.path.expanduser(path)
        for pattern in [path] if os.path.exists(path) else expand_braces(path):
            matched = _match(pattern, suffix)
            if not matched:
                raise InputError(_nothing(pattern, suffix))
            found.update(os.path.abspath(match) for match in matched)
    return sorted(found)


def expand_braces(pattern: str) -> Iterator[str]:
    """The patterns that a shell makes of `{a,b}` and `{00..12}`; braces with neither inside stay as they are."""
    for match in BRACES.finditer(pattern):
        body = match.group(1)
        numbers = NUMBERS.match(body)
        if "," not in body and numbers is None:
            continue
        for choice in _number_range(*numbers.groups()) if numbers else body.split(","):
            yield from expand_braces(pattern[: match.start()] + choice + pattern[match.end() :])
        return
    yield pattern


def _number_range(first: str, last: str) -> Iterator[str]:
    width = max(len(first), len(last)) if first.startswith("0") or last.startswith("0") else 0
    step = 1 if int(first) <= int(last) else -1
    return (f"{number:0{width}d}" for number in range(int(first), int(last) + step, step))


def _match(pattern: str, suffix: str) -> list[str]:
    if os.path.isdir(pattern):
        return list(_walk(pattern, suffix))
    if os.path.exists(pattern):
        return [pattern]
    files: list[str] = []
    for match in glob.iglob(pattern, recursive=True):
        if _is_hidden_match(match, pattern):
            continue
        files.extend(_walk(match, suffix) if os.path.isdir(match) else [match])
    return files


def _is_hidden_match(path: str, pattern: str) -> bool:
    """Whether a wildcard reached a name that begins with `_` or `.` without the pattern asking for such a name."""
    asked = [part for part in pattern.split("/") if part.startswith(HIDDEN)]
    return any(
        part.startswith(HIDDEN) and not any(fnmatch.fnmatchcase(part, name) for name in asked)
        for part in path.split("/")
    )


def _walk(folder: str, suffix: str) -> Iterator[str]:
    """Files below a folder, links followed. A folder is entered once, so that a link to its parent ends."""
    entered: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(parent)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(HIDDEN))
        yield from (
            os.path.join(parent, name) for name in names if name.endswith(suffix) and not name.startswith(HIDDEN)
        )


def _refuse(error: OSError) -> None:
    raise InputError(f"cannot list a folder of input.path: {error}") from error


def _nothing(pattern: str, suffix: str) -> str:
    if os.path.isdir(pattern):
        return f"input.path={pattern} is a folder without any *{suffix} file"
    return f"input.path={pattern} finds no file (the current folder is {os.getcwd()})"
