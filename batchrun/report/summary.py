"""The last words of a run on stdout: a few rows, the totals, and where to look."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from batchrun.data.outputs import OutputSchema
from batchrun.data.values import to_python
from batchrun.output import Output
from batchrun.report.metrics import Metrics

SHOWN_ROWS = 5


def print_summary(output: Output, done: np.ndarray, metrics: Metrics) -> None:
    """What the run came to, and a few of the rows in the finished chunks `done` of this worker's share."""
    plan, folder = output.job.plan, output.store.folder
    rows = plan.results_of(done)
    _, starts, stops = plan.bounds(done)
    if rows:
        first = plan.chunk(done[starts < stops][0])
        for line in _first_rows(folder / first.part, output.schema):
            print(line)
    if metrics.rows:
        totals = metrics.summary()
        print(f"{'rows':<14}{rows:,}" + (f" ({metrics.rows:,} in this run)" if metrics.rows < rows else ""))
        if metrics.error_types:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in metrics.error_types.most_common())
            print(f"{'errors':<14}{kinds}")
        if metrics.parse_errors:
            print(f"{'unparsed':<14}{metrics.parse_errors:,} completions: the column parse_error says why")
        for name, counts in metrics.values.items():
            shares = ", ".join(f"{value} {count:,}" for value, count in counts.most_common())
            print(f"{name:<14}{shares}")
        if skipped := metrics.statuses["skipped"]:
            print(f"{'skipped':<14}{skipped:,}")
        if metrics.deduplicated:
            print(f"{'deduplicated':<14}{metrics.deduplicated:,} rows have the prompt of another and its result")
        print(f"{'prompt':<14}{metrics.prompt_tokens:,} tokens, {metrics.cached_tokens:,} of them cached")
        speed = f"{totals['total_tokens_per_s']:,} tokens/s in all, {totals['engine_s']:,} s"
        if output.schema.task_types is None:
            forced = f", {totals['forced_share']:.0%} of them forced by their form" if metrics.forced_tokens else ""
            print(f"{'output':<14}{metrics.completion_tokens:,} tokens{forced}")
            speed = f"{totals['completion_tokens_per_s']:,} output tokens/s, {speed}"
        else:
            speed = f"{totals['rows_per_s']:,} rows/s, {speed}"
        print(f"{'speed':<14}{speed}" + (f", {totals['padding']:.1%} padding" if metrics.padding else ""))
    else:
        print(f"all {rows:,} rows were there already: nothing was computed")
    print(f"{'parts':<14}{folder}")
    look = f"import pyarrow.dataset as d; print(d.dataset('{folder}').head(5).to_pandas())"
    print(f'{"look at it":<14}{sys.executable} -c "{look}"')


def _first_rows(part: Path, schema: OutputSchema) -> list[str]:
    """The first rows of a part: what was asked, cut to fit, and what came."""
    width = shutil.get_terminal_size((100, 24)).columns
    shown = [*_text_column(schema), next(iter(schema.names.values()))]
    with pq.ParquetFile(part) as file:
        batch = next(file.iter_batches(batch_size=SHOWN_ROWS, columns=shown))
    each = (width - 8) // len(shown)

    def line(label: object, values: Iterable[object]) -> str:
        cells = (_cut(" ".join(str(value).split()), each) for value in values)
        return f"{label!s:>3}  " + " | ".join(f"{cell:<{each}}" for cell in cells).rstrip()

    values = zip(*(to_python(batch.column(name)) for name in shown), strict=True)
    rows = [line(number, row) for number, row in enumerate(values)]
    return [line("", shown), *rows, ""]


def _text_column(schema: OutputSchema) -> list[str]:
    """A string column of the input to show beside the completion, if it has one."""
    texts = [name for name in schema.kept if str(schema.schema.field(name).type) in ("string", "large_string")]
    usual: list[str] = [name for name in ("text", "prompt", "question") if name in texts]
    return usual[:1] or texts[-1:]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"
