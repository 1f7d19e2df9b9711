"""One table with every type that input may have: what is carried must come out as it went in."""

from __future__ import annotations

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LARGEST = 2**63 - 1


def columns(rows: int) -> dict[str, pa.Array]:
    """Arrays with a null and with the type's extremes, where it has any."""

    def fill(values: list[Any], type: pa.DataType) -> pa.Array:
        return pa.array([values[i % len(values)] for i in range(rows)], type)

    struct = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return {
        "int64": fill([1, None, LARGEST, -LARGEST - 1, 0], pa.int64()),
        "uint64": fill([0, 2**64 - 1, None], pa.uint64()),
        "int8": fill([-128, 127, None], pa.int8()),
        "bool": fill([True, False, None], pa.bool_()),
        "half": pa.array([np.float16(i / 3) for i in range(rows)], pa.float16()),
        "double": fill([0.1, float("inf"), -0.0, None, 5e-324], pa.float64()),
        "ts_s": fill([0, -1, None], pa.timestamp("s")),
        "ts_ns": fill([1, LARGEST, None], pa.timestamp("ns")),
        "ts_paris": fill([1_711_846_800_000_000, None, 0], pa.timestamp("us", "Europe/Paris")),
        "date": fill([datetime.date(1, 1, 1), datetime.date(9999, 12, 31), None], pa.date32()),
        "time": fill([86_399_999_999_999, 0, None], pa.time64("ns")),
        "duration": fill([-1, LARGEST, None], pa.duration("us")),
        "decimal": fill([Decimal("12345678901234567890123456789.123456789"), None], pa.decimal128(38, 9)),
        "decimal256": fill([Decimal(10) ** 59, None], pa.decimal256(60, 0)),
        "dictionary": fill(["red", None, "blue", "red"], pa.string()).dictionary_encode(),
        "large_string": fill(["x" * 1000, "", None], pa.large_string()),
        "string_view": fill(["a text of more than twelve bytes", None], pa.string_view()),
        "binary": fill([b"\x00\xff", b"", None], pa.binary()),
        "fixed_binary": fill([b"1234", None], pa.binary(4)),
        "list_struct": fill([[{"a": 1, "b": ["x", None]}, None], [], None], pa.list_(struct)),
        "large_list": fill([[1, None], [], None], pa.large_list(pa.int32())),
        "fixed_list": fill([[1.0, 2.0], [None, 0.5]], pa.list_(pa.float32(), 2)),
        "map": fill([[("k", 1), ("l", None)], [], None], pa.map_(pa.string(), pa.int64())),
        "null": pa.nulls(rows),
        "image": fill([{"bytes": b"\x89PNG", "path": None}, None], image),
        "label": fill([0, 1, None], pa.int64()),
        "two words é": fill(["x", None], pa.string()),
    }


# What `datasets` has no type for, in any Parquet file.
NOT_IN_DATASETS = ("map",)


def table(rows: int = 64, without: tuple[str, ...] = ()) -> pa.Table:
    """All columns, and `text`, which holds a prompt for the tiny models of the tests."""
    arrays = {name: array for name, array in columns(rows).items() if name not in without}
    arrays["text"] = pa.array([f"w{4 + i % 250} w{4 + i // 250}" for i in range(rows)])
    return pa.table(arrays)


def with_features(made: pa.Table) -> pa.Table:
    """The table as `datasets` would have written it, with features that Arrow's types do not show."""
    from datasets import ClassLabel, Features, Image

    features = Features.from_arrow_schema(made.schema)
    features |= {"image": Image(), "label": ClassLabel(names=["cat", "dog"])}
    return made.replace_schema_metadata(Features(features).arrow_schema.metadata)


def write(path: Path, made: pa.Table) -> Path:
    """As Parquet, or as Arrow IPC for a name that ends so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".arrow":
        with pa.ipc.new_file(str(path), made.schema) as writer:
            writer.write_table(made, max_chunksize=10)
    else:
        pq.write_table(made, path, row_group_size=10)
    return path
