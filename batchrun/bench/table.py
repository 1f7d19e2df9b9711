"""Measurements as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from batchrun.bench.measure import Measurement

GIB = 2**30


def comparison(measurements: Sequence[Measurement]) -> list[str]:
    """A line for each engine and workload: median, range, ratio to the best rival, and share of the floor."""
    head = ["workload", "engine", "median s", "min - max s", "vs best rival", "tok/s", "floor s", "of floor",
            "same rows", "CPUs", "others", "RSS GiB", "load s"]  # fmt: skip
    rows = [head]
    for workload in dict.fromkeys(m.workload for m in measurements):
        groups = _groups(m for m in measurements if m.workload == workload)
        rival = best_rival(measurements, workload)
        ordered = sorted(groups, key=lambda name: _seconds(groups[name]))
        rows += [_line(groups[name], groups.get(rival or "")) for name in ordered]
    return [*align(rows if len(rows) > 1 else []), *(m.error.splitlines()[0] for m in measurements if m.error)]


def best_rival(measurements: Sequence[Measurement], workload: str) -> str | None:
    """The engine that is not ours with the smallest median on a workload."""
    groups = _groups(m for m in measurements if m.workload == workload and not m.ours)
    return min(groups, key=lambda name: _seconds(groups[name]), default=None)


def ratio(slow: Sequence[Measurement], fast: Sequence[Measurement]) -> float | None:
    """How many times faster the second is: the median over the rounds that both have, since machines drift."""
    by_round = {m.round: m.seconds for m in slow if m.seconds}
    ratios = [by_round[m.round] / m.seconds for m in fast if m.seconds and m.round in by_round]
    return median(ratios) if ratios else None


def _groups(measurements: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for m in measurements:
        if m.seconds is not None:
            groups.setdefault(m.engine, []).append(m)
    return groups


def _seconds(group: Sequence[Measurement]) -> float:
    return median(m.seconds for m in group if m.seconds is not None)


def _line(group: list[Measurement], rival: list[Measurement] | None) -> list[str]:
    one, middle = group[0], _seconds(group)
    seconds = [m.seconds or 0.0 for m in group]
    against = ratio(rival, group) if rival else None
    least = max(one.compute_floor_s, one.weights_floor_s)
    total = sum(seconds)
    return [
        one.workload,
        one.engine,
        f"{middle:.2f}",
        f"{min(seconds):.2f} - {max(seconds):.2f}",
        f"{against:.2f}x" if against else "-",
        f"{(one.prompt_tokens + one.output_tokens) / middle:,.0f}",
        f"{least:.2f}",
        f"{least / middle:.0%}",
        f"{median(m.same_rows or 0.0 for m in group):.0%}",
        f"{sum(m.cpu_s or 0.0 for m in group) / total:.2f}",
        f"{sum(m.other_cpu_s or 0.0 for m in group) / total:.2f}",
        f"{max(m.peak_rss_bytes or 0 for m in group) / GIB:.1f}",
        f"{one.load_s or 0:.0f}",
    ]


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell: text to the left, numbers (all that is not in the first two) right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([_pad(cell, i, widths[i]) for i, cell in enumerate(row)] for row in rows)
    return ["  ".join(row).rstrip() for row in padded]


def _pad(cell: str, column: int, width: int) -> str:
    return cell.ljust(width) if column < 2 else cell.rjust(width)
