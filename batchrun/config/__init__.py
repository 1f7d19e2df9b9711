"""The one schema of every setting: names, types, limits, and which settings change a completion.

Hydra composes these dataclasses from conf/, jobs/ and the command line; nothing else in the package knows Hydra.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from batchrun.config.base import in_range, one_of, setting, strings
from batchrun.config.bench import BenchConfig
from batchrun.config.embed import EmbedConfig
from batchrun.config.engine import EngineConfig
from batchrun.config.input import InputConfig
from batchrun.config.model import ModelConfig
from batchrun.config.output import OutputConfig
from batchrun.config.prompt import PromptConfig
from batchrun.config.rank import RankConfig
from batchrun.config.reasoning import ReasoningConfig
from batchrun.config.run import JobConfig, LaunchConfig, ReportConfig, RunConfig
from batchrun.config.sampling import MAX_PATTERN, SamplingConfig
from batchrun.config.structure import StructureConfig
from batchrun.config.tasks import TASKS, ChooseConfig, ScoreConfig
from batchrun.errors import ConfigError
from batchrun.tool_calls import FORMATS

MODES = ("run", "plan", "preview", "bench", "status", "merge", "reparse")
RETRIES = ("error", "length")


@dataclass
class Config:
    """A whole job."""

    mode: str = setting("run", "run, plan, preview, bench, status, merge or reparse", identity=False)
    task: str = setting(
        "generate",
        "what is done with each row: generate (a completion), choose (one of given labels), score (how likely it is), "
        "embed (a vector) or rank (scores of a classifier)",
        identity=True,
    )
    preview_rows: int = setting(3, "rows shown by mode=preview", identity=False)
    retry: Any = setting(
        None, "make rows of finished parts again: error, length or both; sampling may differ then", identity=False
    )
    offline: bool = setting(False, "never ask the model hub; fail at once if a file is not local", identity=False)
    job: JobConfig = field(default_factory=JobConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    structure: StructureConfig = field(default_factory=StructureConfig)
    reasoning: ReasoningConfig = field(default_factory=ReasoningConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    choose: ChooseConfig = field(default_factory=ChooseConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    rank: RankConfig = field(default_factory=RankConfig)
    input: InputConfig = field(default_factory=InputConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    run: RunConfig = field(default_factory=RunConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)

    def __post_init__(self) -> None:
        one_of("mode", self.mode, MODES)
        one_of("task", self.task, TASKS)
        in_range("preview_rows", self.preview_rows, 1)
        self.retry = [kind for item in strings("retry", self.retry) for kind in item.split(",")]
        for kind in self.retry:
            one_of("retry", kind, RETRIES)
        # Here and not with the section, because a row may set one of the two alone.
        sampling = self.sampling
        in_range("sampling.min_tokens", sampling.min_tokens, 0, sampling.max_tokens, "sampling.max_tokens")
        longest = sampling.repetition_max_pattern or MAX_PATTERN
        in_range("sampling.repetition_min_pattern", sampling.repetition_min_pattern, 1, longest)
        if sampling.adapter not in (None, *self.model.adapters):
            raise ConfigError(
                f"sampling.adapter={sampling.adapter} is none of model.adapters={list(self.model.adapters)}: give its "
                "folder there"
            )
        if sampling.n > 1 and self.task != "generate":
            raise ConfigError(f"task={self.task} has one result for a row: sampling.n={sampling.n} must be 1")
        if sampling.n > 1 and sampling.temperature == 0 and self.prompt.params is None:
            raise ConfigError(
                f"sampling.n={sampling.n} samples of a row would all be the same with sampling.temperature=0: set a "
                "temperature above 0, or n=1"
            )
        if (self.prompt.turns or self.prompt.prompts) and self.task != "generate":
            raise ConfigError(f"prompt.turns and prompt.prompts need completions: task={self.task} has none")
        if (self.output.derived or self.output.duplicates) and self.task != "generate":
            raise ConfigError(f"output.derived and output.duplicates need completions: task={self.task} has none")
        if self.prompt.prompts:
            last = list(self.prompt.prompts)[-1]
            if self.output.completion not in ("completion", last):
                raise ConfigError(
                    "prompt.prompts names the columns of its answers: leave out "
                    f"output.completion={self.output.completion}"
                )
            self.output.completion = last
        if self.retry and self.output.overwrite:
            raise ConfigError("retry keeps an output and output.overwrite=true replaces it: set one of them")
        if self.output.retry_invalid and sampling.temperature == 0:
            raise ConfigError(
                f"output.retry_invalid={self.output.retry_invalid} would get the same completion again, as sampling is "
                "greedy: set sampling.temperature above 0"
            )
        if self.output.retry_invalid and (self.prompt.turns or self.prompt.prompts):
            raise ConfigError(
                "output.retry_invalid asks for one completion again: prompt.turns and prompts have several"
            )
        if self.output.tool_calls in FORMATS and self.prompt.turns:
            raise ConfigError(
                f"output.tool_calls={self.output.tool_calls} takes calls out of the text, and in prompt.turns a later "
                "turn has to see them: set it to null"
            )
        if self.structure.given and self.task != "generate":
            raise ConfigError(
                f"structure.{self.structure.given[0]} is the form of completions, and task={self.task} makes none"
            )
        if self.input.format == "openai":
            self._take_requests()
        if self.task != "generate":
            self._check_task()

    def _take_requests(self) -> None:
        """A request of OpenAI's batch file brings its own messages and parameters, in columns of these names."""
        prompt = self.prompt
        sources = (prompt.template, prompt.template_file, prompt.messages, prompt.prompt_ids, prompt.prompts or None)
        if all(value is None for value in sources):
            prompt.messages = "messages"
            prompt.tools_column = prompt.tools_column or "tools"
        if prompt.params is None:
            prompt.params = "params"
        for key, columns in (("input.columns", self.input.columns), ("output.columns", self.output.columns)):
            if columns is not None and "custom_id" not in columns:
                raise ConfigError(f"{key}={columns} leaves out custom_id, by which answers to requests are told apart")

    def _check_task(self) -> None:
        """Refuse what only completions have a use for."""
        unused = {
            "input.format=openai": self.input.format == "openai",
            f"prompt.params={self.prompt.params}": self.prompt.params is not None,
            f"output.parse={self.output.parse}": self.output.parse != "none",
            f"output.tool_calls={self.output.tool_calls}": self.output.tool_calls in FORMATS,
        }
        for key in (key for key, is_set in unused.items() if is_set):
            raise ConfigError(f"{key} is for completions, and task={self.task} makes none: use task=generate")


def leaves(schema: type = Config, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Every setting by its dotted key, in the order of the schema."""
    import typing

    hints = typing.get_type_hints(schema)
    found: dict[str, dataclasses.Field[Any]] = {}
    for f in dataclasses.fields(schema):
        key = f"{prefix}{f.name}"
        if dataclasses.is_dataclass(hints[f.name]):
            found |= leaves(hints[f.name], f"{key}.")
        else:
            found[key] = f
    return found


def lookup(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def identity(config: Config) -> dict[str, Any]:
    """The settings that change a completion, by dotted key, as plain values for JSON."""
    return {key: lookup(config, key) for key, f in leaves().items() if f.metadata["identity"]}
