"""Rows to complete: token ids and an exact number of tokens to generate, the same for every engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from batchrun.config import Config
from batchrun.errors import ConfigError, InputError

SEED = 20261129
TEXT = (
    "the customer reported that delivery arrived late but support was friendly and refund took three days "
    "we tested battery screen camera software update network speed price quality of this product against "
    "earlier models in winter when roads were closed people walked along river bank watching boats pass under "
    "old bridge while engineers measured load stress temperature humidity every hour for two weeks results "
    "were surprising because average values stayed flat although peaks doubled during morning traffic"
)
VOCABULARY = TEXT.split()
INSTRUCTION = (
    "You label customer feedback. Read the text and answer with one JSON object holding three fields: "
    "sentiment (positive, negative or neutral), topic (delivery, quality, price, support or other) and "
    "summary (at most twelve words). Do not add any explanation. \n\n"
)
EXAMPLE = 'Text: {}\nAnswer: {{"sentiment": "neutral", "topic": "other", "summary": "{}"}}\n\n'
UNEVEN = [32, 64, 96, 128, 192, 256, 384]  # output tokens of `generate`
WARMUP_ROWS, WARMUP_TOKENS, WARMUP_OUTPUT = 8, 96, 8
WARMUP_SHARED = 64  # tokens that the second half of them begins with


@dataclass(slots=True)
class Row:
    """A prompt, and how many tokens every engine must generate after it."""

    prompt_ids: list[int]
    max_tokens: int


@dataclass(slots=True)
class Workload:
    """Rows under a name."""

    name: str
    rows: list[Row]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(row.prompt_ids) for row in self.rows)

    @property
    def output_tokens(self) -> int:
        return sum(row.max_tokens for row in self.rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its output."""
        return max((len(row.prompt_ids) + row.max_tokens for row in self.rows), default=0)


Texts = list[tuple[str, int]]  # what the user says, and the number of tokens to generate


def fixed_texts() -> dict[str, Texts]:
    """The fixed workloads by name. One stream of random numbers runs through all of them, in this order."""
    rng = random.Random(SEED)
    return {name: make(rng) for name, make in MAKERS.items()}


def fixed_workload(name: str, tokenizer: Any, limit: int | None = None) -> Workload:
    """One of the fixed workloads, its first `limit` rows, through the tokenizer's chat template if it has one.

    Raises ConfigError for a name that there is not.
    """
    if name not in MAKERS:
        raise ConfigError(f"bench.workloads has {name!r}: there are {', '.join(MAKERS)}; own rows come by input.path")
    return Workload(name, [Row(encode(tokenizer, text), count) for text, count in fixed_texts()[name][:limit]])


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one user message, ready for the answer."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"])


def own_workload(config: Config, limit: int | None = None) -> Workload:
    """The rows of input.path under the name `input`.

    The prompt is the job's; without one it is column `prompt_ids`, else column `text` as a user message. A row
    generates sampling.max_tokens, or the max_tokens of its own in the column of prompt.params. Rows that make no
    prompt are left out. Raises ConfigError, InputError.
    """
    from batchrun.job import open_job

    _choose_prompt(config)
    job = open_job(config, weights=False)
    usable = (prompt for prompt in _prompts(job) if prompt.error_type is None)
    rows = [
        Row(prompt.ids, (prompt.params or {}).get("max_tokens", config.sampling.max_tokens))
        for prompt in islice(usable, limit)
    ]
    if not rows:
        raise InputError(f"no row of {', '.join(config.input.path)} makes a prompt: mode=preview shows why")
    return Workload("input", rows)


def warmup_rows(workloads: Sequence[Workload], vocab_size: int) -> list[Row]:
    """Rows that begin with a token that no row of the workloads begins with, so that nothing of them can be reused.

    Among themselves half of them share a prefix: what an engine does about that is warmed up too.
    """
    taken = {row.prompt_ids[0] for workload in workloads for row in workload.rows}
    rng = random.Random(SEED)
    free = [token for token in range(vocab_size) if token not in taken]
    heads = rng.sample(free, min(WARMUP_ROWS // 2, len(free)))
    prompts = [[head, *(rng.randrange(vocab_size) for _ in range(WARMUP_TOKENS - 1))] for head in heads]
    shared = prompts[0][:WARMUP_SHARED]
    tail = WARMUP_TOKENS - WARMUP_SHARED
    prompts += [[*shared, *(rng.randrange(vocab_size) for _ in range(tail))] for _ in range(WARMUP_ROWS // 2)]
    return [Row(prompt, WARMUP_OUTPUT) for prompt in prompts]


def _choose_prompt(config: Config) -> None:
    from batchrun.data.sources import open_source

    prompt = config.prompt
    if any(x is not None for x in (prompt.template, prompt.template_file, prompt.messages, prompt.prompt_ids)):
        return
    names = open_source(config.input, offline=config.offline).schema.names
    if "prompt_ids" in names:
        prompt.prompt_ids = "prompt_ids"
    elif "text" in names:
        prompt.template = "{{ text }}"
    else:
        raise InputError(
            f"the input has neither a column prompt_ids nor a column text, but {', '.join(names)}: "
            "name the prompt, e.g. prompt.template='{{ review }}'"
        )


def _prompts(job: Any) -> Iterator[Any]:
    import numpy as np

    for _, _, batch in job.read(np.arange(job.plan.num_chunks), job.prompts.columns):
        yield from job.prompts.build(batch)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(VOCABULARY) for _ in range(count))


def _annotate(rng: random.Random) -> Texts:
    """One instruction and six examples before every row, a short row, a short answer."""
    head = INSTRUCTION + "".join(EXAMPLE.format(_words(rng, 24), _words(rng, 8)) for _ in range(6))
    return [(f"{head}Text: {_words(rng, rng.randint(20, 120))}\nAnswer:", rng.randint(8, 48)) for _ in range(256)]


def _generate(rng: random.Random) -> Texts:
    """Short prompts, long outputs of very uneven length."""
    return [(f"Write a story about {_words(rng, rng.randint(3, 20))}", rng.choice(UNEVEN)) for _ in range(96)]


def _summarise(rng: random.Random) -> Texts:
    """Long documents, short outputs."""
    return [(f"Summarise the report.\n{_words(rng, rng.randint(1200, 2200))}", rng.randint(24, 64)) for _ in range(16)]


def _single(_: random.Random) -> Texts:
    """One prompt alone."""
    return [("Write a short introduction about the US capital city", 128)]


MAKERS: dict[str, Callable[[random.Random], Texts]] = {
    "annotate": _annotate,
    "generate": _generate,
    "summarise": _summarise,
    "single": _single,
}
