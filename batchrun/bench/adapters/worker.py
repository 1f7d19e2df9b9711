"""Serves one engine to the bench: python worker.py ADAPTER.py < commands > replies, a line of JSON each.

First line in: {"spec": ..., "warmup": [[prompt_ids, max_tokens], ...]}; first line out: {"version": ..., ...}.
Then for each {"rows": FILE, "outputs": FILE}, both JSON: {"ready": true} out, an empty line in, {"seconds": ...} out.
Only the standard library is used here.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

PR_SET_PDEATHSIG = 1


def main(adapter: str) -> int:
    """Serve until the commands end. A failure is replied as {"error": ...}, with the traceback on stderr."""
    commands, replies = _take_streams()
    _die_with_parent()
    # This folder is not for the engine's imports.
    sys.path.pop(0)
    try:
        first = json.loads(commands.readline())
        engine = _load(adapter).Engine(first["spec"])
        started = time.perf_counter()
        engine.generate(first["warmup"])
        _reply(replies, version=engine.version, warmup_seconds=time.perf_counter() - started, pid=os.getpid())
        for line in commands:
            _serve(engine, json.loads(line), commands, replies)
    except Exception as error:
        traceback.print_exc()
        _reply(replies, error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def _serve(engine: Any, command: dict[str, str], commands: Any, replies: Any) -> None:
    with open(command["rows"]) as file:
        rows = json.load(file)
    engine.reset(rows)
    _reply(replies, ready=True)
    commands.readline()
    started = time.perf_counter()
    outputs = engine.generate(rows)
    seconds = time.perf_counter() - started
    with open(command["outputs"], "w") as file:
        json.dump([[int(token) for token in output] for output in outputs], file)
    _reply(replies, seconds=seconds)


def _take_streams() -> tuple[Any, Any]:
    """Standard input and output for the protocol alone: engines print, and may read."""
    commands = os.fdopen(os.dup(0))
    replies = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return commands, replies


def _reply(replies: Any, **fields: Any) -> None:
    replies.write(json.dumps(fields) + "\n")
    replies.flush()


def _die_with_parent() -> None:
    """A stopped process would outlive a killed bench and keep its memory."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("bench_adapter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
