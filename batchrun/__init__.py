"""Run a language model over a Parquet dataset offline: one output row for each input row."""

__version__ = "0.1.0"
