"""Log-probabilities of generated tokens as columns of the output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

LOGPROBS = "logprobs"
CUMULATIVE = "cumulative_logprob"
_TOKEN = [("token_id", pa.int32()), ("logprob", pa.float32())]
TOKENS = pa.list_(pa.struct([*_TOKEN, ("top", pa.list_(pa.struct(_TOKEN)))]))


def logprob_columns(asked: bool) -> dict[str, pa.DataType]:
    """The columns of a job whose rows may have them."""
    return {CUMULATIVE: pa.float64(), LOGPROBS: TOKENS} if asked else {}


def logprob_values(token_ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
    """What a row has in those columns: its tokens in their order, and the sum over them.

    `token_ids`, int32 [T, k + 1], and `logprobs`, float32 [T, k + 1], have the generated token in the first column and
    the k likeliest in the others, best first.
    """
    rows = [
        [{"token_id": token, "logprob": logprob} for token, logprob in zip(tokens, values, strict=True)]
        for tokens, values in zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    ]
    return {
        CUMULATIVE: float(logprobs[:, 0].sum(dtype=np.float64)),
        LOGPROBS: [{**own, "top": top} for own, *top in rows],
    }
