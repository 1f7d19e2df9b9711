"""From `input.path` to a sorted list of files: folders, globs, braces, local or remote."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

from batchrun.data.storage import Storage, base_name, is_url, reading
from batchrun.data.values import clean_text
from batchrun.errors import InputError

BRACES = re.compile(r"\{([^{}]*)\}")
HIDDEN = ("_", ".")
NUMBERS = re.compile(r"^(\d+)\.\.(\d+)$")


def find_files(paths: Sequence[str], suffixes: str | Sequence[str], storage: Storage | None = None) -> list[str]:
    """Absolute paths, or URLs, of all files that `paths` name, sorted, each once.

    A path is a file, a folder (searched to any depth for `suffixes`), or a glob with `**`, `{a,b}` and `{00..12}`;
    a file or folder that exists under the literal name wins over its reading as a pattern. Names that begin with
    `_` or `.` are skipped in folders and by wildcards. Raises InputError for a path that finds nothing.
    """
    if not paths:
        raise InputError("input.path is empty: give a file, a folder, a glob or a list of them")
    suffixes = (suffixes,) if isinstance(suffixes, str) else tuple(suffixes)
    storage = storage or Storage()
    found: set[str] = set()
    for path in paths:
        if is_url(path):
            with reading(path, "list the files there"):
                found.update(_find_remote(path, suffixes, storage))
            continue
        path = os.path.expanduser(path.removeprefix("file://"))
        for pattern in [path] if os.path.exists(path) else expand_braces(path):
            matched = _match(pattern, suffixes)
            if not matched:
                raise InputError(_nothing(pattern, suffixes, os.path.isdir(pattern)))
            found.update(os.path.abspath(match) for match in matched)
    return sorted(found)


def names_of(paths: Sequence[str]) -> list[str]:
    """Each path below the deepest folder that holds all of them, with `/` between folders."""
    parts = [re.split(r"[/\\]" if os.sep == "\\" else "/", base_name(path)) for path in paths]
    levels = zip(*(folders[:-1] for folders in parts), strict=False)
    shared = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, levels))
    return [clean_text("/".join(folders[shared:])) for folders in parts]


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


def _find_remote(url: str, suffixes: tuple[str, ...], storage: Storage) -> list[str]:
    filesystem, path = storage.filesystem(url)
    try:
        kind = filesystem.info(path)["type"]
    except FileNotFoundError:
        kind = None
    found = [path] if kind == "file" else []
    if kind == "directory":
        found = [name for name in filesystem.find(path) if _is_data(name, path, suffixes)]
        if not found:
            raise InputError(_nothing(url, suffixes, True))
    elif kind is None:
        for pattern in expand_braces(path):
            matched = _glob_remote(filesystem, pattern, suffixes)
            if not matched:
                raise InputError(_nothing(filesystem.unstrip_protocol(pattern), suffixes, False))
            found += matched
    return [filesystem.unstrip_protocol(name) for name in found]


def _glob_remote(filesystem: object, pattern: str, suffixes: tuple[str, ...]) -> list[str]:
    files: list[str] = []
    for name, info in filesystem.glob(pattern, detail=True).items():  # type: ignore[attr-defined]
        if _is_hidden_match(name, pattern):
            continue
        if info["type"] == "directory":
            below = filesystem.find(name)  # type: ignore[attr-defined]
            files += [file for file in below if _is_data(file, name, suffixes)]
        else:
            files.append(name)
    return files


def _is_data(path: str, folder: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file below a remote folder belongs to the input, by the rules for local folders."""
    below = path[len(folder) :].strip("/").split("/")
    return base_name(path).endswith(suffixes) and not any(part.startswith(HIDDEN) for part in below)


def _match(pattern: str, suffixes: tuple[str, ...]) -> list[str]:
    if os.path.isdir(pattern):
        return list(_walk(pattern, suffixes))
    if os.path.exists(pattern):
        return [pattern]
    files: list[str] = []
    for match in glob.iglob(pattern, recursive=True):
        if _is_hidden_match(match, pattern):
            continue
        files.extend(_walk(match, suffixes) if os.path.isdir(match) else [match])
    return files


def _is_hidden_match(path: str, pattern: str) -> bool:
    """Whether a wildcard reached a name that begins with `_` or `.` without the pattern asking for such a name."""
    asked = [part for part in pattern.split("/") if part.startswith(HIDDEN)]
    return any(
        part.startswith(HIDDEN) and not any(fnmatch.fnmatchcase(part, name) for name in asked)
        for part in path.split("/")
    )


def _walk(folder: str, suffixes: tuple[str, ...]) -> Iterator[str]:
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
            os.path.join(parent, name) for name in names if name.endswith(suffixes) and not name.startswith(HIDDEN)
        )


def _refuse(error: OSError) -> None:
    raise InputError(f"cannot list a folder of input.path: {error}") from error


def _nothing(pattern: str, suffixes: tuple[str, ...], is_folder: bool) -> str:
    if is_folder:
        return f"input.path={pattern} is a folder without any {' or '.join(f'*{end}' for end in suffixes)} file"
    if is_url(pattern):
        return f"input.path={pattern} finds no file there"
    return f"input.path={pattern} finds no file (the current folder is {os.getcwd()})"
