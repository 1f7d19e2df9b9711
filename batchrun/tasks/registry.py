"""Which tasks there are."""

from __future__ import annotations

from batchrun.config import Config
from batchrun.tasks.base import Task
from batchrun.tasks.choose import Choose
from batchrun.tasks.embed import Embed
from batchrun.tasks.generate import Generate
from batchrun.tasks.rank import Rank
from batchrun.tasks.score import Score

TASKS: dict[str, type[Task]] = {
    "generate": Generate,
    "choose": Choose,
    "score": Score,
    "embed": Embed,
    "rank": Rank,
}


def make_task(config: Config) -> Task:
    """The task that the config names. Raises ConfigError for settings that it cannot work with."""
    return TASKS[config.task](config)
