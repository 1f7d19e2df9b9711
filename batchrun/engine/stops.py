"""What ends a row beside its length: stop strings and stop tokens of its own, in thinking and after it."""

from __future__ import annotations

from typing import Any

from batchrun.engine.detokenizer import StopMatcher
from batchrun.engine.forms import End
from batchrun.engine.params import SamplingParams
from batchrun.engine.sequence import Sequence
from batchrun.engine.slots import Slots
from batchrun.engine.thinking import Thinking


class Stops:
    """Looks at the tokens of running rows that watch for stops or think, one after the other."""

    def __init__(self, slots: Slots, tokenizer: Any) -> None:
        self._slots = slots
        self._tokenizer = tokenizer

    def of(self, params: SamplingParams) -> StopMatcher | None:
        """What looks for the stop strings of a row; None if it has none."""
        return StopMatcher(self._tokenizer, params) if params.stop else None

    def find(self, slot: int, token: int) -> End | None:
        """Whether the row's own stops end it with this token."""
        sequence = self._slots.sequence(slot)
        if sequence.thinking is not None and not sequence.thinking.over:
            return self._think(slot, sequence, sequence.thinking, token)
        return _match(sequence, token)

    def _think(self, slot: int, sequence: Sequence, thinking: Thinking, token: int) -> End | None:
        """Take a token before the answer, and end the thinking if it has had its tokens."""
        slots, params = self._slots, sequence.request.params
        answer = thinking.add(token)
        if thinking.reasoning.stop_in_thinking and (ended := _match(sequence, token)) is not None:
            return ended
        if thinking.spent:
            closing = thinking.close(int(slots.max_total[slot] - slots.num_tokens[slot]))
            slots.append(slot, closing)
            if sequence.logprobs is not None:
                for each in closing:
                    sequence.logprobs.add_unsampled(each)
        if not thinking.over:
            return None
        slots.thinks[slot] = False
        slots.watched[slot] = bool(params.stop or params.stop_token_ids)
        sequence.stops = self.of(params)
        if sequence.constraint is not None:
            slots.constrained[slot] = True
            if answer:  # sampled before it was known to be of the answer, whose form may forbid it
                slots.drop_last(slot)
                if sequence.logprobs is not None:
                    sequence.logprobs.drop_last()
                return None
        return next((end for each in answer if (end := _match(sequence, each)) is not None), None)


def _match(sequence: Sequence, token: int) -> End | None:
    if token in sequence.request.params.stop_token_ids:
        return None, token, "stop"
    match = None if sequence.stops is None else sequence.stops.add(token)
    return None if match is None else (*match, "stop")
