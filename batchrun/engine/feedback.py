"""The newest token of each slot, kept on the device: a step takes it from there before the host has read it."""

from __future__ import annotations

import torch

from batchrun.engine.device import runs_triton


class Feedback:
    """`newest` int64 [capacity + 1]: the last place takes what belongs to no slot."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.newest = torch.zeros(capacity + 1, dtype=torch.int64, device=device)

    def feed(self, token_ids: torch.Tensor, fed: torch.Tensor) -> None:
        """Put tokens in their places, in place: token_ids int64 [T], fed int64 [T] (slot, or -1: not here)."""
        if runs_triton(token_ids.device):
            from batchrun_kernels.gather_last import feed_tokens

            feed_tokens(token_ids, fed, self.newest)
        else:
            token_ids.copy_(torch.where(fed >= 0, self.newest[fed], token_ids))

    def note(self, tokens: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """These are the newest tokens (int64 [K], -1 for none that can be) of slots (int64 [K]), distinct but for the
        place of none. They are counted in a table of TokenCounts, which only a device with Triton has."""
        tokens = tokens.clamp(min=0)
        if runs_triton(tokens.device):
            from batchrun_kernels.gather_last import note_tokens

            note_tokens(tokens, slots, self.newest, counts)
        else:
            self.newest[slots] = tokens
