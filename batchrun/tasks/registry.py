"""Which tasks there are."""

from __future__ import annotations

from batchrun.config import Config
from batchrun.tasks.base import Task
from batchrun.tasks.generate import Generate

TASKS: dict[str, type[Task]] = {"generate": Generate}


def make_task(config: Config) -> Task:
    """The task that the config names. Raises ConfigError for settings that it cannot work with."""
    return TASKS[config.task](config)
