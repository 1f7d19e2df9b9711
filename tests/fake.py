"""An engine without a model, for tests of everything around it: as many steps as asked, rows out of order."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from batchrun.config import Config
from batchrun.engine.params import Completion, Likelihood, Request
from batchrun.errors import BatchrunError
from batchrun.signals import INTERRUPTED, Drain


class FakeEngine:
    """Completes `batch` requests a step, the last first, each with a text that follows from its prompt, and from its
    seed unless it is greedy; or with likelihoods, where these are asked for.

    With BATCHRUN_FAKE_LOG, each completed request leaves a line there with its prompt's ids and its seed. A step takes
    BATCHRUN_FAKE_SECONDS. With BATCHRUN_FAKE_BAD, requests fail whose first id is divisible by it.
    """

    def __init__(self, batch: int = 16, room: int = 32) -> None:
        self.batch = batch
        self.capacity = room
        self.waiting: list[Request] = []
        self.steps = 0
        self.seconds = float(os.environ.get("BATCHRUN_FAKE_SECONDS", "0"))
        self.bad_ids = int(os.environ.get("BATCHRUN_FAKE_BAD", "0"))
        self.completed = 0
        log = os.environ.get("BATCHRUN_FAKE_LOG")
        self._log = None if log is None else os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @property
    def room(self) -> int:
        return self.capacity - len(self.waiting)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def has_work(self) -> bool:
        return bool(self.waiting)

    def drop_waiting(self) -> list[Any]:
        dropped = [request.key for request in self.waiting[self.batch :]]
        del self.waiting[self.batch :]
        return dropped

    def take_steps(self) -> list[None]:
        steps, self.steps = self.steps, 0
        return [None] * steps

    def check_integrity(self) -> None:
        pass

    def close(self) -> None:
        pass

    def step(self) -> list[Completion]:
        self.steps += 1
        if self.seconds:
            time.sleep(self.seconds)
        running, self.waiting = self.waiting[-self.batch :], self.waiting[: -self.batch]
        self.completed += len(running)
        if self._log is not None:
            lines = (" ".join(map(str, [*request.prompt_ids, request.params.seed or 0])) for request in running)
            os.write(self._log, "".join(f"{line}\n" for line in lines).encode())
        return [self._complete(request) for request in reversed(running)]

    def _complete(self, request: Request) -> Completion:
        ids = request.prompt_ids
        if self.bad_ids and ids[0] % self.bad_ids == 0:
            return failure(request)
        if request.continuations:
            found = likelihoods(ids, request.continuations)
            return Completion(request.key, "", [], "stop", prompt_tokens=len(ids), likelihoods=found)
        text = answer(ids) + (f"~{request.params.seed}" if request.params.temperature else "")
        return Completion(request.key, text, [5, 1], "stop", prompt_tokens=len(ids))


def failure(request: Request) -> Completion:
    return Completion(request.key, "", [], "error", error_type="engine_error", error="a stray particle")


def answer(ids: Any) -> str:
    return "a" + "-".join(map(str, ids))


def likeliest(ids: Any, count: int) -> int:
    """Which of so many continuations of a prompt this engine finds likeliest."""
    return sum(map(int, ids)) % count


def likelihoods(ids: Any, continuations: Sequence[tuple[int, ...]]) -> list[Likelihood]:
    best = likeliest(ids, len(continuations))
    return [
        Likelihood(np.full(len(tokens), -1.0 if number == best else -9.0), np.full(len(tokens), number == best))
        for number, tokens in enumerate(continuations)
    ]


def words(number: int) -> str:
    """A prompt for the tiny tokenizer that no other number has."""
    digits = []
    for _ in range(4):
        number, digit = divmod(number, 200)
        digits.append(f"w{digit + 4}")
    return " ".join(digits)


def main(arguments: list[str]) -> int:
    """The command, with this engine in place of the real one."""
    from batchrun import cli, runner

    runner.load_engine = lambda *_: FakeEngine()  # type: ignore[assignment]
    return cli.main(arguments)


def run_job(config: Config, **environment: str) -> NoReturn:
    """One job in a process of its own, ended with the exit code that the command would have."""
    from batchrun import runner

    os.environ.update(environment)
    runner.load_engine = lambda *_: FakeEngine()  # type: ignore[assignment]
    drain = Drain(config.run.drain_seconds)
    try:
        with drain.listening():
            code = runner.run(config, drain)
    except BatchrunError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "tests.fake"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
