"""Each attention backend against attention written out query by query in float64."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from batchrun.engine.attention import cpu
from batchrun.engine.attention.base import AttentionBackend, LayerCall, LayerGeometry, zero_pages
from batchrun.engine.attention.prefix import PrefixGroup, Sharing, prefix_groups, shared_prefixes
from batchrun.engine.attention.registry import BACKENDS
from batchrun.engine.batch import Batch, make_batch
from batchrun.engine.kv_cache import HOLE, KvGroup
from batchrun.engine.kv_layout import KvLayout
from batchrun.engine.params import Request
from batchrun.engine.sequence import Sequence
from batchrun.engine.slots import Slots
from batchrun_kernels.cpu import attention as cpu_kernels
from batchrun_kernels.cpu.emit import processor_has

CPU = torch.device("cpu")


@pytest.fixture(params=sorted(BACKENDS))
def backend_class(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    return BACKENDS[request.param]


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 8
    value_dim: int = 8
    block_size: int = 4
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    lengths: tuple[int, ...] = (1, 3, 9, 16, 21, 40)
    chunks: tuple[int, ...] = field(default=(100,))  # most query tokens per row, step after step, then again

    def geometry(self, source: int | None = None) -> LayerGeometry:
        return LayerGeometry(self.kv_heads, self.key_dim, self.value_dim, source, self.window)


SHAPES = {
    "plain": Shape(),
    "one head each": Shape(kv_heads=4),
    "one kv head": Shape(heads=6, kv_heads=1),
    "values narrower than keys": Shape(key_dim=12, value_dim=5),
    "values wider than keys": Shape(key_dim=3, value_dim=7, softcap=2.0),
    "window": Shape(window=5),
    "window of one": Shape(window=1),
    "window wider than all": Shape(window=64),
    "softcap": Shape(softcap=1.5),
    "sinks": Shape(sinks=True),
    "everything": Shape(window=6, softcap=3.0, sinks=True, key_dim=6, value_dim=10),
    "blocks of one": Shape(block_size=1, lengths=(1, 2, 5, 8)),
    "blocks longer than rows": Shape(block_size=64),
}


def naive(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: int, call: LayerCall) -> torch.Tensor:
    """One query [Hq, Dk] at position `at` over its row's keys [L, Hkv, Dk] and values [L, Hkv, Dv] -> [Hq, Dv]."""
    first = 0 if call.window is None else max(0, at - call.window + 1)
    out = []
    for head in range(len(q)):
        kv = head // (len(q) // keys.shape[1])
        logits = keys[first : at + 1, kv] @ q[head] * call.scale
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        weights = logits.exp()
        total = weights.sum() + (0 if call.sinks is None else call.sinks[head].double().exp())
        out.append(weights @ values[first : at + 1, kv] / total)
    return torch.stack(out)


class Rows:
    """Rows with random q, k, v for all their positions, in blocks that lie scattered.

    The first `shared` blocks of every row that is longer are the same.
    """

    def __init__(self, shape: Shape, seed: int, shared: int = 0, groups: tuple[KvGroup, ...] = (KvGroup(),)) -> None:
        self.shape = shape
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        per_row = [-(-length // shape.block_size) for length in shape.lengths]
        tables = sum(group.tables for group in groups)
        self.num_blocks = tables * sum(per_row) + 3
        scattered = rng.permutation(self.num_blocks)
        self.groups = groups
        self.slots = Slots(len(shape.lengths), shape.block_size, groups)
        self.q, self.k, self.v = {}, {}, {}
        prefix: dict[int, torch.Tensor] = {}
        for length, count in zip(shape.lengths, per_row, strict=True):
            ids = np.zeros(length, dtype=np.int32)
            sequence = Sequence(Request(length, ids), 0, ids, length, length + 1, [], 0.0)
            head = min(shared, (length - 1) // shape.block_size)
            common_blocks = range(self.num_blocks, self.num_blocks + head)
            blocks = [[*common_blocks, *own[head:]] for own in scattered[: tables * count].reshape(tables, -1).tolist()]
            slot = self.slots.put(sequence, blocks, 0)
            scattered = scattered[tables * count :]
            self.q[slot] = torch.randn(length, shape.heads, shape.key_dim)
            self.k[slot] = torch.randn(length, shape.kv_heads, shape.key_dim)
            self.v[slot] = torch.randn(length, shape.kv_heads, shape.value_dim)
            common = head * shape.block_size
            for same in (self.k, self.v):
                same[slot][:common] = prefix.setdefault(
                    id(same), torch.randn(shared * shape.block_size, *same[slot].shape[1:])
                )[:common]
        self.num_blocks += shared
        self.call = LayerCall(
            layer=0,
            scale=0.4,
            window=shape.window,
            softcap=shape.softcap,
            sinks=torch.randn(shape.heads) if shape.sinks else None,
        )

    def batches(self, chunks: tuple[int, ...], give_back: bool = False) -> list[Batch]:
        """Steps of at most `chunks[i]` query tokens for each row, until all rows are through. With `give_back` a block
        becomes a hole as soon as the row's next query does not see it."""
        steps: list[Batch] = []
        while True:
            left = self.slots.num_tokens - self.slots.num_computed
            rows = np.flatnonzero(left > 0)
            if not len(rows):
                return steps
            steps.append(make_batch(self.slots, rows, np.minimum(left[rows], chunks[len(steps) % len(chunks)])))
            self.slots.num_computed[steps[-1].slots] = steps[-1].seq_lens
            for number, group in enumerate(self.groups if give_back else ()):
                for slot in rows.tolist():
                    passed = int(group.first_seen(self.slots.num_computed[slot])) // self.shape.block_size
                    self.slots.give_back(slot, number, passed)

    def flat(self, batch: Batch, values: dict[int, torch.Tensor]) -> torch.Tensor:
        owner = np.repeat(batch.slots, np.diff(batch.query_starts))
        return torch.stack([values[slot][at] for slot, at in zip(owner.tolist(), batch.positions, strict=True)])

    def expected(self, batch: Batch, call: LayerCall) -> torch.Tensor:
        owner = np.repeat(batch.slots, np.diff(batch.query_starts))
        return torch.stack([
            naive(self.q[slot][at].double(), self.k[slot].double(), self.v[slot].double(), int(at), call)
            for slot, at in zip(owner.tolist(), batch.positions, strict=True)
        ])  # fmt: skip


@pytest.mark.parametrize("chunks", [(100,), (1,), (7,), (3, 1, 8)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_equals_naive_attention(backend_class: type[AttentionBackend], name: str, chunks: tuple[int, ...]) -> None:
    shape = SHAPES[name]
    rows = Rows(shape, seed=len(name))
    backend = backend_class([shape.geometry()], rows.num_blocks, shape.block_size, torch.float32, CPU)
    steps = rows.batches(chunks)
    if len(chunks) > 1:
        assert any(0 < batch.num_decodes < len(batch.slots) for batch in steps), "no step mixes decodes and prompts"
    for batch in steps:
        backend.begin(batch)
        out = backend.attend(rows.call, *(rows.flat(batch, x) for x in (rows.q, rows.k, rows.v)))
        torch.testing.assert_close(out.double(), rows.expected(batch, rows.call), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_new_pages_are_zeros_that_can_be_written(dtype: torch.dtype) -> None:
    pages = zero_pages((3, 5, 7), dtype, CPU)
    assert (pages.shape, pages.dtype) == ((3, 5, 7), dtype)
    assert (pages.float() == 0).all()
    pages[1] = 1
    assert float(pages.float().sum()) == 35


def test_layers_keep_their_own_pages_and_windows(backend_class: type[AttentionBackend]) -> None:
    """Two layers without a window and two with one, in two tables that share memory."""
    shapes = (Shape(), Shape(window=4), Shape(), Shape(window=4))
    layers = [Rows(shape, seed) for seed, shape in enumerate(shapes)]
    geometry = [shape.geometry() for shape in shapes]
    rows = Rows(shapes[0], seed=0, groups=KvLayout.of(geometry).groups)
    assert rows.slots.block_tables.shape[0] == 2
    backend = backend_class(geometry, rows.num_blocks, shapes[0].block_size, torch.float32, CPU)
    calls = [replace(layer.call, layer=index) for index, layer in enumerate(layers)]
    for batch in rows.batches((7,), give_back=True):
        assert (batch.block_tables[1] == HOLE).any() == (int(batch.positions.max()) > 10)
        backend.begin(batch)
        for layer, call in zip(layers, calls, strict=True):
            out = backend.attend(call, *(layer.flat(batch, x) for x in (layer.q, layer.k, layer.v)))
            torch.testing.assert_close(out.double(), layer.expected(batch, call), rtol=1e-4, atol=1e-5)


def test_a_sharing_layer_reads_the_pages_of_its_source_and_writes_none(backend_class: type[AttentionBackend]) -> None:
    shape = Shape()
    rows = Rows(shape, seed=3)
    layers = [shape.geometry(), shape.geometry(source=0)]
    backend = backend_class(layers, rows.num_blocks, shape.block_size, torch.float32, CPU)
    sharing = replace(rows.call, layer=1, window=5)
    for batch in rows.batches((7,)):
        backend.begin(batch)
        q, k, v = (rows.flat(batch, x) for x in (rows.q, rows.k, rows.v))
        backend.attend(rows.call, q, k, v)
        out = backend.attend(sharing, q, torch.full_like(k, 99.0), torch.full_like(v, 99.0))
        torch.testing.assert_close(out.double(), rows.expected(batch, sharing), rtol=1e-4, atol=1e-5)
    assert layers[1].bytes_per_token(torch.float32) == 0
    assert layers[0].bytes_per_token(torch.float32) == 2 * (8 + 8) * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near_the_exact_result(backend_class: type[AttentionBackend], dtype: torch.dtype) -> None:
    shape = Shape(softcap=4.0, sinks=True)
    rows = Rows(shape, seed=4)
    backend = backend_class([shape.geometry()], rows.num_blocks, shape.block_size, dtype, CPU)
    for batch in rows.batches((7,)):
        backend.begin(batch)
        out = backend.attend(rows.call, *(rows.flat(batch, x).to(dtype) for x in (rows.q, rows.k, rows.v)))
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), rows.expected(batch, rows.call), rtol=0.1, atol=0.05)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=9, kv_heads=3, key_dim=64, value_dim=64, block_size=64),
        Shape(key_dim=128, value_dim=64, block_size=32, window=40),
        Shape(heads=8, kv_heads=1, key_dim=32, value_dim=96, block_size=96, softcap=3.0, sinks=True),
    ],
    ids=["nine heads", "window", "softcap and sinks"],
)
@pytest.mark.parametrize(
    ("unit", "chunks"),
    [
        ("the fastest", (300,)),
        ("the fastest", (1,)),
        ("the fastest", (37, 1, 8)),
        ("pairs", (37, 1, 8)),
        ("floats", (37, 1, 8)),
    ],
    ids=str,
)
@pytest.mark.parametrize("prefix", [0, 2])
def test_units_that_multiply_bfloat16(
    shape: Shape, unit: str, chunks: tuple[int, ...], prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads and blocks in whole tiles: computed with AMX where there is one, and with either kind of vectors."""
    if unit != "the fastest":
        monkeypatch.setattr(cpu, "has_matrix_unit", lambda: False)
        monkeypatch.setattr(cpu_kernels, "pairs_at_full_rate", lambda: unit == "pairs")
    if unit == "pairs" and not processor_has("avx512bf16"):
        pytest.skip("this processor has no AVX512-BF16")
    monkeypatch.setattr(cpu, "MIN_GROUP_ROWS", 2)
    monkeypatch.setattr(cpu, "MIN_SAVED_BLOCKS", 1)
    rows = Rows(replace(shape, lengths=(210, 197, 250) if prefix else (3, 70, 150)), seed=4, shared=prefix)
    call = replace(rows.call, scale=shape.key_dim**-0.5)
    backend = cpu.CpuAttention([shape.geometry()], rows.num_blocks, shape.block_size, torch.bfloat16, CPU)
    for cache in (rows.q, rows.k, rows.v):
        for slot, x in cache.items():
            cache[slot] = x.bfloat16().to(x.dtype)
    for batch in rows.batches(chunks):
        backend.begin(batch)
        out = backend.attend(call, *(rows.flat(batch, x).bfloat16() for x in (rows.q, rows.k, rows.v)))
        expected = rows.expected(batch, call)
        assert (out.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("name", SHAPES)
def test_prefix_groups_equal_naive_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MIN_GROUP_ROWS", 2)
    monkeypatch.setattr(cpu, "MIN_SAVED_BLOCKS", 1)
    monkeypatch.setattr(cpu, "SPAN_TOKENS", 3)
    shape = replace(SHAPES[name], lengths=(30, 3, 41, 29, 26, 37, 22))
    if shape.block_size > 8:
        shape = replace(shape, block_size=8)
    rows = Rows(shape, seed=5, shared=2)
    backend = cpu.CpuAttention([shape.geometry()], rows.num_blocks, shape.block_size, torch.float32, CPU)
    grouped = 0
    for batch in rows.batches((9, 1, 4)):
        grouped += sum(len(group.rows) for group in prefix_groups(batch, batch.block_tables[0], shape.block_size, 2, 1))
        backend.begin(batch)
        out = backend.attend(rows.call, *(rows.flat(batch, x) for x in (rows.q, rows.k, rows.v)))
        torch.testing.assert_close(out.double(), rows.expected(batch, rows.call), rtol=1e-4, atol=1e-5)
    assert grouped > 10


def test_prefix_groups_take_the_depth_that_saves_most() -> None:
    shape = Shape(block_size=4, lengths=(20,) * 6)
    rows = Rows(shape, seed=0)
    tables = rows.slots.block_tables[0]
    tables[:6, 0] = 7  # all six begin alike, four of them three blocks deep, one of these differs after two
    tables[:4, 1] = 8
    tables[:3, 2] = 9
    rows.slots.num_computed[:6] = 19
    batch = make_batch(rows.slots, np.arange(6), np.ones(6, dtype=np.int64))
    shared = batch.block_tables[0]
    groups = prefix_groups(batch, shared, 4, min_rows=2, min_saved=1)
    assert [sorted(batch.slots[group.rows].tolist()) for group in groups] == [[0, 1, 2, 3], [4, 5]]
    assert [group.blocks.tolist() for group in groups] == [[7, 8], [7]]
    assert prefix_groups(batch, shared, 4, min_rows=5, min_saved=5)[0].depth == 1
    assert prefix_groups(batch, shared, 4, min_rows=7, min_saved=1) == []
    rows.slots.num_computed[:6] = 3  # nothing is computed to the end of a block
    batch = make_batch(rows.slots, np.arange(6), np.ones(6, dtype=np.int64))
    assert prefix_groups(batch, batch.block_tables[0], 4, 2, 1) == []


def test_groups_are_those_of_a_walk_one_block_at_a_time() -> None:
    """Over random trees of blocks, with rows that have given back their first."""
    random, found = np.random.default_rng(0), 0
    for _ in range(300):
        rows, columns = random.integers(2, 20), random.integers(1, 8)
        tables = random.integers(0, 3, (rows, columns)) + 10 * np.arange(columns)
        for column in range(1, columns):  # a block is of one path only
            tables[:, column] += 100 * tables[:, column - 1]
        tables[random.random(rows) < 0.1, 0] = HOLE
        computed = random.integers(0, 4 * columns + 1, rows)
        groups = shared_prefixes(computed, tables, 4, min_rows=3, min_saved=4)
        walked = walk(computed // 4, tables, 3, 4)
        assert sorted((g.rows.tolist(), g.blocks.tolist()) for g in groups) == sorted(walked)
        found += len(groups)
    assert found > 100


def walk(limit: np.ndarray, tables: np.ndarray, min_rows: int, min_saved: int) -> list[tuple[list[int], list[int]]]:
    left = [row for row in range(len(tables)) if limit[row] and tables[row, 0] != HOLE]
    groups = []
    while left:
        path: list[int] = []
        best: tuple[int, list[int]] = (0, left)
        alive, top = left, Counter(tables[left, 0].tolist()).most_common(1)[0][0]
        while len(alive) >= min_rows:
            alive = [row for row in alive if limit[row] > len(path)]
            blocks = Counter(int(tables[row, len(path)]) for row in alive)
            if not blocks:
                break
            path.append(min(block for block in blocks if blocks[block] == max(blocks.values())))
            alive = [row for row in alive if tables[row, len(path) - 1] == path[-1]]
            if len(alive) >= min_rows and (len(alive) - 1) * len(path) > best[0]:
                best = (len(alive) - 1) * len(path), alive
                deepest = len(path)
        if not best[0]:
            left = [row for row in left if tables[row, 0] != top]
            continue
        if best[0] >= min_saved:
            groups.append((best[1], path[:deepest]))
        left = [row for row in left if row not in best[1]]
    return groups


def test_groups_as_flat_arrays() -> None:
    """Rows of one to three queries; row 2 is in no group."""
    lens, starts = np.array([1, 3, 2, 1, 2]), np.array([0, 1, 4, 6, 7])
    groups = [PrefixGroup(np.array([0, 3]), np.array([5, 6])), PrefixGroup(np.array([1, 4]), np.array([9]))]
    sharing = Sharing.of(groups, 4, starts, lens, np.arange(9) + 20)
    assert sharing.first_keys.tolist() == [8, 4, 0, 8, 4]
    assert (sharing.leaders.tolist(), sharing.shared_lens.tolist()) == ([0, 1], [8, 4])
    assert (sharing.token_starts.tolist(), sharing.token_counts.tolist()) == ([0, 2, 7], [2, 5])
    assert sharing.tokens.tolist() == [0, 6, 1, 2, 3, 7, 8]
    assert sharing.positions.tolist() == [20, 26, 21, 22, 23, 27, 28]
    nothing = Sharing.none()
    assert (nothing.token_starts.tolist(), len(nothing.tokens), len(nothing.leaders)) == ([0], 0, 0)


@pytest.mark.parametrize("chunks", [(100,), (1,), (3, 1, 8)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_int8_pages_are_read_as_what_they_hold(name: str, chunks: tuple[int, ...]) -> None:
    """Keys and values that 8 bits and a scale can say exactly come back as they were."""
    shape = SHAPES[name]
    rows = Rows(shape, seed=len(name))
    for cache in (rows.k, rows.v):
        for slot, x in cache.items():
            whole = (x * 40).round().clamp(-127, 127)
            whole[..., 0] = 127
            cache[slot] = whole * torch.rand(*x.shape[:2], 1) / 60
    backend = cpu.Int8Attention([shape.geometry()], rows.num_blocks, shape.block_size, torch.float32, CPU)
    for batch in rows.batches(chunks):
        backend.begin(batch)
        out = backend.attend(rows.call, *(rows.flat(batch, x) for x in (rows.q, rows.k, rows.v)))
        torch.testing.assert_close(out.double(), rows.expected(batch, rows.call), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_int8_pages_stay_near_the_exact_result(dtype: torch.dtype) -> None:
    shape = Shape(key_dim=64, value_dim=64, block_size=32, lengths=(3, 70, 150))
    rows = Rows(shape, seed=4)
    call = replace(rows.call, scale=64**-0.5)
    backend = cpu.Int8Attention([shape.geometry()], rows.num_blocks, shape.block_size, dtype, CPU)
    for batch in rows.batches((7,)):
        backend.begin(batch)
        out = backend.attend(call, *(rows.flat(batch, x).to(dtype) for x in (rows.q, rows.k, rows.v)))
        expected = rows.expected(batch, call)
        assert (out.double() - expected).norm() < 0.02 * expected.norm()
