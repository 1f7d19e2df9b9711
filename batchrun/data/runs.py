"""A record of each run that works on an output: when, with which settings, and whether it came to its end."""

from __future__ import annotations

import datetime
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchrun.data.disk import explained, read_json, replace_json
from batchrun.data.plan import STATE_FOLDER


def new_run_id() -> str:
    """A name for a run that sorts by time and that no other run has."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S-%f}-{secrets.token_hex(2)}"


class Runs:
    """The records of an output, one small file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / STATE_FOLDER / "runs"

    def begin(self, run: str, record: Mapping[str, Any]) -> None:
        """Write down that a run begins, or goes on. Raises BatchrunError if the disk refuses."""
        with explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_json(self._path(run), {"run": run, "began": _now(), **record, "ended": None})

    def end(self, run: str) -> None:
        """Write down that a run did all it was to do."""
        with explained(self.folder):
            record = read_json(self._path(run))
            if record is not None:
                replace_json(self._path(run), {**record, "ended": _now()})

    def unfinished(self, record: Mapping[str, Any]) -> str | None:
        """The last run with this record that did not come to its end."""
        for path in sorted(self.folder.glob("[!.]*.json"), reverse=True):
            found = read_json(path) or {}
            if found.get("ended") is None and all(found.get(key) == value for key, value in record.items()):
                return path.stem
        return None

    def _path(self, run: str) -> Path:
        return self.folder / f"{run}.json"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
