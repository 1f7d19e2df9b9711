"""The engines that are loaded, by their labels; each is started when it is first needed."""

from __future__ import annotations

import logging
from collections.abc import Collection
from types import TracebackType
from typing import Self

from batchrun.bench.engines import EngineSpec
from batchrun.bench.process import EngineFailed, EngineProcess, Surroundings, Timing
from batchrun.bench.workloads import Row

log = logging.getLogger(__name__)


class Fleet:
    """At most one engine runs at a time. On leaving, all of them are ended."""

    def __init__(self, around: Surroundings, warmup: list[Row]) -> None:
        self._around = around
        self._warmup = warmup
        self._running: dict[str, EngineProcess] = {}

    def run(self, spec: EngineSpec, rows: list[Row]) -> tuple[EngineProcess, Timing]:
        """Complete the rows. Raises EngineFailed, and then the engine is ended."""
        if spec.label not in self._running:
            log.info("loading %s", spec.label)
            self._running[spec.label] = EngineProcess(spec, self._around, self._warmup)
        engine = self._running[spec.label]
        try:
            return engine, engine.run(rows)
        except EngineFailed:
            del self._running[spec.label]
            engine.close()
            raise

    def keep(self, labels: Collection[str]) -> None:
        """End the engines that are not among `labels`."""
        for label in [label for label in self._running if label not in labels]:
            self._running.pop(label).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.keep(())
