"""A completion for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from batchrun.config import Config, ReasoningConfig
from batchrun.data.logprobs import PROMPT_LOGPROBS, logprob_columns, logprob_values, token_values
from batchrun.data.outputs import RowResult
from batchrun.data.parsing import Parser
from batchrun.data.row_params import row_sampling
from batchrun.engine.checkpoint import Checkpoint
from batchrun.engine.params import Completion, Request, SamplingParams, sampling_params
from batchrun.engine.reasoning import Reasoning
from batchrun.engine.seeds import row_seed, sample_seed
from batchrun.row import Row
from batchrun.structured import job_form, row_form
from batchrun.tasks.base import Task, prompt_digest, row_result
from batchrun.tool_calls import MARKERS, Answer, ToolCall, special_texts, split_calls

TOOL_CALLS, TOOL_CALLS_ERROR = "tool_calls", "tool_calls_error"
CALLS: dict[str, pa.DataType] = {
    TOOL_CALLS: pa.list_(pa.struct([(name, pa.string()) for name in ToolCall._fields])),
    TOOL_CALLS_ERROR: pa.string(),
}
THINKING: dict[str, pa.DataType] = {"reasoning": pa.string(), "reasoning_tokens": pa.int32()}


class Generate(Task):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.max_tokens = config.sampling.max_tokens
        self.sampling = RowSampling(config)
        # Requests of OpenAI's API ask for them one by one.
        self.with_logprobs = config.sampling.logprobs is not None or config.input.format == "openai"
        self.with_prompt_logprobs = config.sampling.prompt_logprobs is not None
        self.without = {"logprobs": not self.with_logprobs, "prompt_logprobs": not self.with_prompt_logprobs}
        self.retries = config.output.retry_invalid
        self.parser = Parser(config.output) if self.retries else None
        if self.sampling.reasoning is not None:
            self.more_columns = self.more_columns | THINKING
        self.calls = config.output.tool_calls
        self.specials: list[str] = []  # texts of special tokens that are asked for to find calls, and are no answer
        if self.calls is not None:
            self.more_columns = self.more_columns | CALLS
        self.more_columns = self.more_columns | logprob_columns(self.with_logprobs, self.with_prompt_logprobs)

    def prepare(self, checkpoint: Checkpoint, tokenizer: Any) -> None:
        super().prepare(checkpoint, tokenizer)
        sampling, specials = self.config.sampling, special_texts(tokenizer)
        if self.calls is not None and MARKERS[self.calls] in specials and sampling.skip_special_tokens:
            self.specials = specials
            self.sampling = RowSampling(replace(self.config, sampling=replace(sampling, skip_special_tokens=False)))

    def requests(self, row: Row) -> list[Request]:
        assert row.prompt is not None
        if asked := next((name for name in row.prompt.params or () if self.without.get(name)), None):
            raise ValueError(f"{asked} of a row needs the columns that sampling.{asked} of the job makes: 0 is enough")
        return [Request(None, row.prompt.ids, self.sampling.of(row))]

    def result(self, row: Row, completions: Sequence[Completion]) -> RowResult:
        (completion,) = completions
        answer = self._answer(row, completion)
        return row_result(
            row,
            completions,
            text=None if completion.error_type is not None else answer.text,
            finish_reason=completion.finish_reason,
            completion_tokens=len(completion.token_ids),
            max_tokens=completion.max_tokens,
            first_token_s=completion.first_token_s,
            values=self._values(completion, answer),
        )

    def _answer(self, row: Row, completion: Completion) -> Answer:
        """The completion's text without calls of tools, and these."""
        if self.calls is None or completion.error_type is not None:
            return Answer(completion.text, None)
        told = row.prompt is None or row.prompt.tools
        answer = (
            split_calls(completion.text, self.calls, completion.finish_reason) if told else Answer(completion.text, [])
        )
        text = answer.text
        if answer.calls is not None:
            for special in self.specials:
                text = text.replace(special, "")
        return answer._replace(text=text)

    def _values(self, completion: Completion, answer: Answer) -> dict[str, Any] | None:
        """What the row has in the columns beside its completion."""
        values: dict[str, Any] = {}
        if self.calls is not None:
            calls = None if answer.calls is None else [call._asdict() for call in answer.calls]
            values |= {TOOL_CALLS: calls, TOOL_CALLS_ERROR: answer.error}
        if self.sampling.reasoning is not None:
            values |= {key: getattr(completion, key) for key in THINKING}
        if self.with_logprobs and completion.logprobs is not None:
            values |= logprob_values(*completion.logprobs)
        if self.with_prompt_logprobs and completion.prompt_logprobs is not None:
            values[PROMPT_LOGPROBS] = token_values(*completion.prompt_logprobs)
        return values or None

    def again(self, row: Row, completions: Sequence[Completion], attempt: int) -> list[Request]:
        """The same with another seed, for a completion that does not parse."""
        (completion,) = completions
        if self.parser is None or attempt > self.retries or completion.error_type is not None:
            return []
        (request,) = self.requests(row)
        _, wrong = self.parser.parse(self._answer(row, completion).text, completion.finish_reason)
        # Greedy completions would come out the same.
        if wrong is None or request.params.temperature == 0:
            return []
        request.params = replace(request.params, seed=row_seed(request.params.seed or 0, "attempt", attempt))
        return [request]

    def identity(self) -> dict[str, Any]:
        form, texts = self.sampling.form, dict[str, Any]()
        if form is not None and form.kind in ("json", "grammar"):
            texts[f"structure.{form.kind}"] = getattr(form, form.kind)
        if self.parser is not None:
            # It says which completions are taken.
            texts["output.schema (for output.retry_invalid)"] = self.parser.settings["output.schema"]
        return texts

    def repeatable(self, row: Row, requests: Sequence[Request]) -> bool:
        return requests[0].params.temperature == 0 or self.sampling.by_content(row)


class RowSampling:
    """The sampling parameters of each row: the job's, with the row's own in their place."""

    def __init__(self, config: Config) -> None:
        self.config, self.adapters = config.sampling, list(config.model.adapters)
        self.structure, self.form = config.structure, job_form(config)
        self.reasoning = _reasoning(config.reasoning)
        greedy = self.config.temperature == 0
        self.greedy = sampling_params(self.config, 0, self.form, self.reasoning) if greedy else None

    def of(self, row: Row) -> SamplingParams:
        """A row without a seed of its own gets one that follows from the job's seed and the row's place or prompt. Its
        samples have seeds that follow from the row's, the first one the row's own.

        Raises ValueError for parameters that cannot be had.
        """
        own = (row.prompt.params if row.prompt else None) or {}
        if self.greedy is not None and not own:
            return self.greedy
        s, form = row_sampling(self.config, own), row_form(self.structure, own) or self.form
        if s.adapter not in (None, *self.adapters):
            raise ValueError(f"adapter={s.adapter!r} is not one of model.adapters={self.adapters}")
        if s.temperature == 0:
            return sampling_params(s, 0, form, self.reasoning)
        if "seed" in own:
            seed = s.seed
        elif s.seed_by == "content" and row.prompt is not None:
            seed = row_seed(s.seed, prompt_digest(row.prompt.ids).hex())
        else:
            seed = row_seed(s.seed, row.buffer.source_name, row.number)
        return sampling_params(s, sample_seed(seed, row.sample), form, self.reasoning)

    def by_content(self, row: Row) -> bool:
        """Whether the row's seed follows from its prompt, so that equal prompts have equal completions."""
        own = (row.prompt.params if row.prompt else None) or {}
        return "seed" in own or own.get("seed_by", self.config.seed_by) == "content"


def _reasoning(config: ReasoningConfig) -> Reasoning | None:
    if config.start is None or config.end is None:
        return None
    return Reasoning(config.start, config.end, config.max_tokens, config.stop_in_thinking)
