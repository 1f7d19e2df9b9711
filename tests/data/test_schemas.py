from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchrun.data.schemas import promoted, unify
from batchrun.errors import InputError
from tests.data.formats.inputs import opened, rows_of


def write(folder: Path, **columns: Any) -> None:
    for name, table in columns.items():
        pq.write_table(pa.table(table), folder / f"{name}.parquet")


def test_strict_names_files_columns_and_the_ways_out(tmp_path: Path) -> None:
    write(tmp_path, a={"id": [1], "text": ["x"]}, b={"text": ["y"], "id": ["2"], "extra": [1.5]})
    with pytest.raises(InputError, match=r"a\.parquet and .*b\.parquet differ in columns") as error:
        opened(tmp_path)
    assert "\n  id: int64 / string\n  extra: absent / double\n" in str(error.value)
    assert "input.schema=intersect or =union" in str(error.value)


def test_intersect_reads_what_all_have(tmp_path: Path) -> None:
    write(tmp_path, a={"id": [1], "text": ["x"], "old": [0]}, b={"new": [1.5], "text": ["y"], "id": [2]})
    source = opened(tmp_path, schema="intersect")
    assert source.schema.names == ["id", "text"]
    assert [(row["id"], row["text"]) for row in rows_of(source)] == [(1, "x"), (2, "y")]
    with pytest.raises(InputError, match=r"names old, which input\.schema=intersect does not have"):
        opened(tmp_path, schema="intersect", columns=["old"])


def test_intersect_does_not_change_types(tmp_path: Path) -> None:
    write(tmp_path, a={"id": pa.array([1], pa.int32())}, b={"id": pa.array([2], pa.int64())})
    with pytest.raises(InputError, match="id: int32 / int64"):
        opened(tmp_path, schema="intersect")


def test_union_fills_nulls_and_widens_types(tmp_path: Path) -> None:
    write(
        tmp_path,
        a={"id": pa.array([1], pa.int32()), "old": pa.array(["o"])},
        b={"id": pa.array([2**40], pa.int64()), "new": pa.array([1.5], pa.float32())},
        c={"id": pa.array([None], pa.null()), "new": pa.array([0.1], pa.float64())},
    )
    source = opened(tmp_path, schema="union")
    assert source.schema.equals(pa.schema([("id", pa.int64()), ("old", pa.string()), ("new", pa.float64())]))
    assert [(row["id"], row["old"], row["new"]) for row in rows_of(source)] == [
        (1, "o", None), (2**40, None, 1.5), (None, None, 0.1),
    ]  # fmt: skip
    assert [row["new"] for row in rows_of(opened(tmp_path, schema="union", columns=["new"]))] == [None, 1.5, 0.1]
    with pytest.raises(InputError, match=r"names nope, which input\.schema=union does not have"):
        opened(tmp_path, schema="union", columns=["nope"])


def test_union_refuses_what_no_type_holds(tmp_path: Path) -> None:
    write(tmp_path, a={"id": [1]}, b={"id": ["two"]})
    with pytest.raises(InputError, match=r"(?s)id: int64 / string.*no type holds"):
        opened(tmp_path, schema="union")
    schemas = [pa.schema([("x", type)]) for type in (pa.null(), pa.int8(), pa.string())]
    with pytest.raises(InputError, match="c: column x is string, and int8 in the files before it"):
        unify(["a", "b", "c"], schemas, "union", None)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.uint8(), pa.int8(), pa.int16()),
        (pa.uint32(), pa.int32(), pa.int64()),
        (pa.uint64(), pa.int64(), None),
        (pa.int32(), pa.float64(), pa.float64()),
        (pa.int64(), pa.float64(), None),
        (pa.int16(), pa.float32(), pa.float32()),
        (pa.int32(), pa.float32(), None),
        (pa.float16(), pa.float32(), pa.float32()),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.string(), pa.binary(), None),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), pa.string()),
        (pa.decimal128(10, 2), pa.decimal128(12, 4), pa.decimal128(12, 4)),
        (pa.decimal128(10, 2), pa.decimal128(10, 4), None),
        (pa.timestamp("ms"), pa.timestamp("ns"), None),
        (pa.list_(pa.int8()), pa.list_(pa.int32()), pa.list_(pa.int32())),
        (pa.list_(pa.int8()), pa.list_(pa.string()), None),
        (pa.null(), pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int8())])),
    ],
)
def test_promotion_keeps_every_value(one: pa.DataType, other: pa.DataType, both: pa.DataType | None) -> None:
    assert promoted(one, other) == both
    assert promoted(other, one) == both


INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
NUMBERS = [*INTEGERS, pa.float32(), pa.float64()]


@given(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), st.integers(-(2**63), 2**64 - 1))
def test_a_promoted_number_is_the_same_number(one: pa.DataType, other: pa.DataType, value: int) -> None:
    both = promoted(one, other)
    if both is None or not pa.types.is_integer(one):
        return
    signed = not pa.types.is_unsigned_integer(one)
    limit = 2 ** (one.bit_width - signed)
    value = value % limit - (limit // 2 if signed else 0)
    assert pa.scalar(value, one).cast(both).as_py() == value


def features(**types: Any) -> dict[bytes, bytes]:
    return {b"huggingface": json.dumps({"info": {"features": types}}).encode()}


def test_features_are_collected_from_all_files() -> None:
    image, label = {"_type": "Image"}, {"_type": "ClassLabel", "names": ["a"]}
    schemas = [
        pa.schema([("image", pa.binary())], features(image=image)),
        pa.schema([("label", pa.int64()), ("image", pa.binary())], features(label=label, image=image)),
    ]
    joined = unify(["a", "b"], schemas, "union", None)
    assert json.loads(joined.metadata[b"huggingface"])["info"]["features"] == {"image": image, "label": label}
    without = [schemas[0], pa.schema([("image", pa.binary()), ("plain", pa.int64())])]
    assert b"huggingface" not in (unify(["a", "b"], without, "union", None).metadata or {})


def test_a_column_named_like_our_own_is_refused(tmp_path: Path) -> None:
    write(tmp_path, a={"__batchrun_error": [1], "id": [1]})
    with pytest.raises(InputError, match="__batchrun_error, which batchrun keeps for itself"):
        opened(tmp_path)
    assert opened(tmp_path, columns=["id"]).schema.names == ["id"]
