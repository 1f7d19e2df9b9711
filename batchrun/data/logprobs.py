"""Log-probabilities of tokens as columns of the output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

LOGPROBS = "logprobs"
CUMULATIVE = "cumulative_logprob"
PROMPT_LOGPROBS = "prompt_logprobs"
_TOKEN = [("token_id", pa.int32()), ("logprob", pa.float32())]
TOKENS = pa.list_(pa.struct([*_TOKEN, ("top", pa.list_(pa.struct(_TOKEN)))]))


def logprob_columns(generated: bool, prompt: bool) -> dict[str, pa.DataType]:
    """The columns of a job whose rows may have them, of generated tokens or of the prompt's."""
    columns = {CUMULATIVE: pa.float64(), LOGPROBS: TOKENS} if generated else {}
    return columns | ({PROMPT_LOGPROBS: TOKENS} if prompt else {})


def logprob_values(token_ids: np.ndarray, logprobs: np.ndarray) -> dict[str, Any]:
    """What a row has of generated tokens: these in their order, and the sum over them."""
    return {
        CUMULATIVE: float(logprobs[:, 0].sum(dtype=np.float64)),
        LOGPROBS: token_values(token_ids, logprobs),
    }


def token_values(token_ids: np.ndarray, logprobs: np.ndarray) -> list[dict[str, Any]]:
    """Tokens in their order, each with the likeliest in its place.

    `token_ids`, int32 [T, k + 1], and `logprobs`, float32 [T, k + 1], have the token itself in the first column and the
    k likeliest in the others, best first.
    """
    rows = [
        [{"token_id": token, "logprob": logprob} for token, logprob in zip(tokens, values, strict=True)]
        for tokens, values in zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    ]
    return [{**own, "top": top} for own, *top in rows]
