"""The manifest of an output: what made it, and the proof that a later run would make the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchrun.data.disk import temporary
from batchrun.data.plan import MANIFEST, Plan
from batchrun.data.sources import InputFile
from batchrun.errors import BatchrunError, FingerprintMismatch
from batchrun.faults import fault

SHOWN_CHARS = 60
SHOWN_LINES = 20


def _canonical(value: Any) -> Any:
    """Plain JSON values in which 1.0 and 1 are one number, as they are to a reader of the diff."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _file_entries(files: Sequence[InputFile]) -> list[dict[str, Any]]:
    return [{"name": file.name, "size": file.size, "rows": file.rows, "digest": file.digest} for file in files]


def fingerprint(settings: Mapping[str, Any], files: Sequence[InputFile]) -> str:
    """SHA-256, in hex, of the settings that change a completion and of the input's identity (not its location)."""
    identity = {"settings": _canonical(settings), "files": _file_entries(files)}
    return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def build_manifest(settings: Mapping[str, Any], files: Sequence[InputFile], **extra: Any) -> dict[str, Any]:
    """What a later run needs to compare itself with this one. `extra` is kept and never compared (versions, times)."""
    return {
        **extra,
        "fingerprint": fingerprint(settings, files),
        "settings": _canonical(settings),
        "files": _file_entries(files),
    }


def plan_of(manifest: Mapping[str, Any]) -> Plan:
    """The plan of the job that wrote the manifest; its files have no path. Raises BatchrunError if it is damaged."""
    try:
        files = [InputFile(index=i, path="", **entry) for i, entry in enumerate(manifest["files"])]
        settings = manifest["settings"]
        return Plan(files, settings["output.chunk_rows"], settings.get("sampling.n", 1))
    except (KeyError, TypeError, AttributeError) as error:
        raise BatchrunError(
            f"{MANIFEST} in the output folder is not a whole manifest of batchrun ({error!r}): use another output.path"
        ) from error


def write_manifest(folder: str | os.PathLike[str], manifest: Mapping[str, Any]) -> bool:
    """Create the manifest whole or not at all. Returns False, and changes nothing, if there is one already.

    Raises BatchrunError if the folder cannot be written.
    """
    target = Path(folder, MANIFEST)
    written = temporary(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(written, "x", encoding="utf-8") as file:
                json.dump(manifest, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            fault("manifest_before_publish")
            published = _publish(written, target)
            fault("manifest_after_publish")
            return published
        finally:
            written.unlink(missing_ok=True)
    except OSError as error:
        raise BatchrunError(
            f"cannot write {target}: {error}: check output.path, its permissions and the free space"
        ) from error


def _publish(written: Path, target: Path) -> bool:
    try:
        os.link(written, target)
    except FileExistsError:
        return False
    except OSError:
        # A file system without hard links: rename is still whole-or-nothing, only the race for first place is open.
        if target.exists():
            return False
        os.replace(written, target)
    return True


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The manifest of an output folder, or None if it has none. Raises BatchrunError if it cannot be read."""
    path = Path(folder, MANIFEST)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BatchrunError(f"cannot read {path}: {error}: use another output.path, or remove that folder") from error
    if not isinstance(manifest, dict):
        raise BatchrunError(f"{path} is not a manifest of batchrun: use another output.path")
    return manifest


def check_manifest(old: Mapping[str, Any], new: Mapping[str, Any], may_differ: Iterable[str] = ()) -> None:
    """Raise FingerprintMismatch, with one line for each difference, unless both describe the same job.

    Settings of the keys `may_differ` are not compared.
    """
    if old.get("fingerprint") == new.get("fingerprint"):
        return
    free = set(may_differ)
    settings = [
        {key: value for key, value in manifest.get("settings", {}).items() if key not in free}
        for manifest in (old, new)
    ]
    lines = changed_settings(*settings) + _changed_files(old.get("files", []), new.get("files", []))
    if not lines and free:
        return
    if not lines:
        lines = [f"fingerprint: {old.get('fingerprint')} -> {new.get('fingerprint')}"]
    shown = lines[:SHOWN_LINES]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more")
    raise FingerprintMismatch(
        "the output folder belongs to a job with other settings or other input:\n  "
        + "\n  ".join(shown)
        + "\nuse another output.path, go back to the old settings and input, or replace it with output.overwrite=true"
    )


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A line for each setting that is not the same."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key not in old or key not in new or old[key] != new[key]:
            before, after = _shown(old.get(key), new.get(key))
            lines.append(f"{key}: {before} -> {after}")
    return lines


def _shown(old: Any, new: Any) -> tuple[str, str]:
    """Both values as JSON, cut to a window that begins shortly before the first difference."""
    texts = [json.dumps(value, ensure_ascii=False, sort_keys=True) for value in (old, new)]
    pairs = enumerate(zip(*texts, strict=False))
    same = next((at for at, (before, after) in pairs if before != after), min(map(len, texts)))
    start = max(0, same - SHOWN_CHARS // 3) if max(map(len, texts)) > SHOWN_CHARS else 0

    def window(text: str) -> str:
        end = start + SHOWN_CHARS
        return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")

    return window(texts[0]), window(texts[1])


def _changed_files(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    before = {file["name"]: file for file in old}
    after = {file["name"]: file for file in new}
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            lines.append(f"input file {name}: removed")
        elif name not in before:
            lines.append(f"input file {name}: added")
        elif dict(before[name]) != dict(after[name]):
            keys = [key for key in ("size", "rows") if before[name].get(key) != after[name].get(key)]
            changes = [f"{key} {before[name].get(key)} -> {after[name].get(key)}" for key in keys]
            lines.append(f"input file {name}: changed ({', '.join(changes) or 'other content'})")
    return lines
