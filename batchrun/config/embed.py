"""How a text becomes a vector."""

from __future__ import annotations

from dataclasses import dataclass

from batchrun.config.base import in_range, one_of, setting

POOLINGS = ("mean", "cls", "last", "max", "weighted_mean", "mean_sqrt_len")


@dataclass
class EmbedConfig:
    """How task=embed makes a vector of a text. What is not set is taken from the model's files."""

    pooling: str = setting(
        "auto",
        "vector of a text from those of its tokens: mean, cls, last, max, weighted_mean or mean_sqrt_len; auto: as the "
        "model's files say, else mean for encoders and last for decoders",
        identity=True,
    )
    normalize: bool | None = setting(
        None, "bring vectors to length 1; default: as the model's files say, else true", identity=True
    )
    dimensions: int | None = setting(
        None, "first numbers of a vector to keep, for models trained so (Matryoshka); default: all", identity=True
    )
    prompt: str | None = setting(
        None,
        "name of a prompt in the model's files that is put before each text, such as query; default: as they say",
        identity=True,
    )

    def __post_init__(self) -> None:
        one_of("embed.pooling", self.pooling, ("auto", *POOLINGS))
        in_range("embed.dimensions", self.dimensions, 1)
