"""Sequences that wait for a slot, in the order that reuses most and ends soonest.

Rows come in any order, and what is computed for one is cheap for the next that begins alike only while it is
still in the cache. So the queue is filled by generations: those that came while the last one was served are put
in order once, and none of them is overtaken by a later one. Sorting costs O(log n) per row, nothing per step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from batchrun.engine.sequence import Sequence


class WaitingQueue:
    """`append` to the next generation, `popleft` from the present one; `appendleft` is for preempted sequences."""

    def __init__(self) -> None:
        self._present: deque[Sequence] = deque()
        self._next: list[Sequence] = []

    def append(self, sequence: Sequence) -> None:
        self._next.append(sequence)

    def appendleft(self, sequence: Sequence) -> None:
        self._present.appendleft(sequence)

    def head(self) -> Sequence:
        """The sequence that `popleft` will return."""
        if not self._present:
            self._present.extend(planned(self._next))
            self._next = []
        return self._present[0]

    def popleft(self) -> Sequence:
        self.head()
        return self._present.popleft()

    def remove(self, sequence: Sequence) -> None:
        """Take out one that waits; raises ValueError if it does not."""
        (self._present if sequence in self._present else self._next).remove(sequence)

    def __len__(self) -> int:
        return len(self._present) + len(self._next)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._present
        yield from self._next


def planned(sequences: list[Sequence]) -> list[Sequence]:
    """Sequences that begin with the same block side by side, in the order of the prefix tree (BatchLLM, arXiv
    2412.03594, section 4); the groups with the longest completions first, so that short ones fill the end."""
    groups: dict[object, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.digests[0] if sequence.digests else sequence, []).append(sequence)
    longest = sorted(groups.values(), key=lambda group: -max(s.max_total - s.num_prompt for s in group))
    return [
        sequence
        for group in longest
        for sequence in sorted(group, key=lambda s: (s.digests, s.num_prompt - s.max_total))
    ]
