"""One engine in a process of its own: started, run on command, stopped while the others have the machine."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from batchrun.bench.adapters import worker
from batchrun.bench.engines import EngineSpec
from batchrun.bench.workloads import Row
from batchrun.errors import BatchrunError

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
LOG_LINES = 12  # of an engine's own messages, shown when it fails
GRACE_SECONDS = 10.0  # to end by itself


class EngineFailed(BatchrunError):
    """An engine could not be loaded, died, took too long or did other work than was asked."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is the same for every engine of a run."""

    dtype: str  # a torch type's name
    device: str
    cores: list[int]  # that the engines may use, one thread on each
    max_model_len: int  # tokens of the longest row
    kv_cache_gib: float
    limit_seconds: float
    scratch: Path  # an empty folder


@dataclass(slots=True)
class Timing:
    """One run of a workload. Seconds are wall clock where nothing else is said."""

    seconds: float
    cpu_seconds: float  # of the engine's processes
    other_cpu_seconds: float  # of all other processes of the machine meanwhile
    peak_rss_bytes: int
    outputs: list[list[int]]


class EngineProcess:
    """Loaded and warmed up once the constructor returns, and stopped except while it runs.

    Raises EngineFailed from the constructor and from `run`, with the end of what the engine printed.
    """

    def __init__(self, spec: EngineSpec, around: Surroundings, warmup: list[Row]) -> None:
        self.spec = spec
        self.around = around
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [spec.python, worker.__file__, str(spec.adapter)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(spec, len(around.cores)),
            start_new_session=True,
        )
        try:
            reply = self._call(spec=self._settings(), warmup=_plain(warmup))
        except BaseException:
            self.close()
            raise
        self.version: str = reply["version"]
        self.warmup_seconds: float = reply["warmup_seconds"]
        self.load_seconds = time.perf_counter() - started - self.warmup_seconds
        self._signal(signal.SIGSTOP)

    def run(self, rows: list[Row]) -> Timing:
        """Complete the rows, with nothing left in the engine's cache from an earlier run."""
        given, taken = self.around.scratch / "rows.json", self.around.scratch / "outputs.json"
        given.write_text(json.dumps(_plain(rows)))
        self._signal(signal.SIGCONT)
        try:
            self._call(rows=str(given), outputs=str(taken))
            tree = self._tree()
            _reset_peaks(tree)
            before, busy = self._cpu_seconds(), _busy_seconds()
            reply = self._call()
            mine, all_busy = self._cpu_seconds() - before, _busy_seconds() - busy
            outputs = json.loads(taken.read_text())
            self._check(rows, outputs)
            peak = sum(map(_peak_rss, self._tree()))
        finally:
            self._signal(signal.SIGSTOP)
        return Timing(reply["seconds"], mine, max(0.0, all_busy - mine), peak, outputs)

    def close(self) -> None:
        """End the process: by the end of its commands, else by force."""
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process.stdout.close()  # type: ignore[union-attr]
            self._log.close()

    def _settings(self) -> dict[str, Any]:
        spec, around = self.spec, self.around
        return {
            "model": spec.model,
            "settings": spec.settings,
            "dtype": around.dtype,
            "device": around.device,
            "threads": len(around.cores),
            "cores": around.cores,
            "max_model_len": around.max_model_len,
            "kv_cache_gib": around.kv_cache_gib,
        }

    def _call(self, **message: Any) -> dict[str, Any]:
        """Send one line (an empty one for no message) and wait for the line that answers it."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            stdin.write((json.dumps(message) if message else "") + "\n")
            stdin.flush()
        if select.select([stdout], [], [], self.around.limit_seconds)[0]:
            line = stdout.readline()
        elif self._process.poll() is None:
            self._signal(signal.SIGKILL)
            raise EngineFailed(
                f"{self.spec.label} took longer than bench.limit_seconds={self.around.limit_seconds:g} and was ended"
            )
        reply: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        if "error" in reply:
            raise EngineFailed(f"{self.spec.label} failed: {reply['error']}\n{self._last_words()}".rstrip())
        return reply

    def _check(self, rows: list[Row], outputs: list[list[int]]) -> None:
        """The same work: as many rows, and as many tokens in each, as were asked for."""
        if len(outputs) != len(rows):
            raise EngineFailed(f"{self.spec.label} completed {len(outputs)} rows of {len(rows)}")
        for number, (row, tokens) in enumerate(zip(rows, outputs, strict=True)):
            if len(tokens) != row.max_tokens:
                raise EngineFailed(
                    f"{self.spec.label} generated {len(tokens)} tokens in row {number}, where {row.max_tokens} were "
                    "asked for: its time cannot be compared"
                )

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-LOG_LINES:])

    def _signal(self, number: signal.Signals) -> None:
        """To the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _tree(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def _cpu_seconds(self) -> float:
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total


def environment(spec: EngineSpec, threads: int) -> dict[str, str]:
    """The same number of threads for every library: two pools that spin on the same cores slow each other down."""
    changed = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    changed |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if spec.python == sys.executable:
        paths = [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]
        changed["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return {**os.environ, **changed}


def _plain(rows: list[Row]) -> list[tuple[list[int], int]]:
    return [(row.prompt_ids, row.max_tokens) for row in rows]


def _busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used."""
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - getattr(times, "iowait", 0.0))


def _reset_peaks(processes: list[psutil.Process]) -> None:
    """Let the kernel count peaks anew (Linux); elsewhere a peak is one since the start of the process."""
    for process in processes:
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def _peak_rss(process: psutil.Process) -> int:
    """Bytes of resident memory at the most; where the system does not say, those of this moment."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        with contextlib.suppress(psutil.NoSuchProcess):
            return int(process.memory_info().rss)
    return 0
