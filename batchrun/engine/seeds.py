"""Seeds of rows and of their samples."""

from __future__ import annotations

import hashlib


def row_seed(seed: int, *identity: object) -> int:
    """A row's own 63-bit seed from the job's seed and what identifies the row."""
    text = "\x1f".join(map(str, (seed, *identity)))
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little") >> 1


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one of a row's samples: the first one's is the row's."""
    return row_seed(seed, sample) if sample else seed
