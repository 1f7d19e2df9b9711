"""A decoder layer of bfloat16 in one call, by a team of threads.

Between its products a small model does little, and going back to Python for each of ten kernels of a layer takes longer
than some of them. Here one call runs the layer as phases, each cut into pieces that the threads of a team claim: panels
of a product, rows of a norm, spans of the attention.

What a layer is made of comes as numbers and addresses: `layer` int64 [LAYER_WORDS] and `reals` float64 [REALS] last as
long as the model, `step` int64 [STEP_WORDS] as long as a step. Hidden states are [T, hidden].

numba optimises a function together with all that it calls, so each further level of calls compiles the attention once
more: what can be inlined is.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types

from batchrun_kernels.cpu import matrix, product
from batchrun_kernels.cpu.after import NONE
from batchrun_kernels.cpu.attention import attend, write_pages
from batchrun_kernels.cpu.emit import pointer_to
from batchrun_kernels.cpu.layer import rms_norm, rotate
from batchrun_kernels.cpu.scalar import narrow, widen
from batchrun_kernels.cpu.team import (
    DONE,
    JOB,
    LEADING,
    SPINS,
    STOP,
    THREADS,
    claim,
    fetch_add,
    load_acquire,
    publish,
    relax,
    store_release,
    wait_for,
)

# Places in `layer`. Norms, biases, norms of the heads and sinks may be 0 for none. AFTER is the weight whose product
# follows the layer.
(
    HIDDEN, HEADS, KV_HEADS, DIM, INNER, KIND, TILES, ROTATES, WINDOW,
    QKV, QKV_BIAS, OUTPUT, OUTPUT_BIAS, GATE_UP, GATE_UP_BIAS, DOWN, DOWN_BIAS,
    NORM_INPUT, NORM_ATTENTION, NORM_BEFORE, NORM_AFTER, HEAD_NORMS, SINKS,
    BLOCK_SIZE, BLOCKS, PANELS, PAIRS, LANES, WIDTH, K_PAGES, V_PAGES, AFTER, AFTER_FEATURES, AFTER_DEPTH,
) = range(34)  # fmt: skip
LAYER_WORDS = 34
# Places in `reals`: the epsilon of each norm in the order above, of the norms of heads, ...
EPS, HEAD_EPS, SCALE, SOFTCAP = 0, 4, 5, 6
REALS = 7
# Places in `step`.
(
    TOKENS, POSITIONS, SLOT_MAPPING, TABLES, TABLE_ROWS, TABLE_COLUMNS, ORDER, ORDER_LENGTH, JOINED,
    SHARED, SHARED_CUTS, SHARED_PIECES, OWN, OWN_CUTS, OWN_PIECES, TOPS, TOTALS, SUMS,
    NORMED, HEADS_OUT, MIXED, RESIDUAL, GATED,
) = range(23)  # fmt: skip
STEP_WORDS = 23

# Phases, and what a job says beside its phase and its number of pieces.
PRODUCT, NORM, TURN, ATTEND, ENTER, LEAVE = range(6)
PHASE, PIECES = JOB, JOB + 1
X, OUT, ROWS, ADD = JOB + 2, JOB + 3, JOB + 4, JOB + 5
DEPTH, WEIGHT, BIAS, FEATURES, FOLLOWED_BY, WITH_TILES = (JOB + 6 + i for i in range(6))  # of a product
COMING, COMING_FEATURES, COMING_DEPTH = JOB + 12, JOB + 13, JOB + 14  # the weight of the next one
NORM_WEIGHT, NORM_WIDTH, NORM_REAL, NORM_REALS = (JOB + 6 + i for i in range(4))
LAYER, REAL, STEP, COS, SIN, ROTARY, IS_SHARED = (JOB + 6 + i for i in range(7))  # of heads and attention

CHUNK = 256  # tokens at once between attention calls: their activations stay in the cache of a core
FEW_ROWS = 24  # rows of small work that are not worth sharing
# Rows for each thread from which on each takes some of the rows through all products, and not some of the outputs of
# each product for all rows: then what one product gives is in the cache of the core that goes on with it.
OWN_ROWS = 96


halves_at, floats_at, doubles_at = (pointer_to(kind) for kind in (types.uint16, types.float32, types.float64))
longs_at, ints_at, bytes_at = (pointer_to(kind) for kind in (types.int64, types.int32, types.uint8))


@njit(nogil=True, cache=True)
def run_layer(sizes, control, layer, reals, step, x, out, cos, sin, rotary):
    """out [T, hidden] = the layer of x [T, hidden], both bfloat16 at addresses; KV goes to the pages.

    cos and sin [T, rotary], bfloat16 at addresses. The phases and their numbers are those of `FusedLayer`.
    """
    store_release(control, LEADING, 1)
    tokens, hidden = step[TOKENS], layer[HIDDEN]
    heads, mixed = _heads_width(layer), layer[HEADS] * layer[DIM]
    apart = tokens >= OWN_ROWS * control[THREADS]
    together = 0 if apart else tokens
    if apart:
        _lead_rows(sizes, control, layer, reals, step, ENTER, x, out)
    for start in range(0, together, CHUNK):
        rows = min(CHUNK, tokens - start)
        _norm(sizes, control, layer, reals, 0, x + 2 * start * hidden, step[NORMED], 0, rows)
        _product(
            sizes, control, layer, step[NORMED], rows, hidden, QKV, 0, step[HEADS_OUT] + 2 * start * heads, heads, NONE
        )
    _attention(sizes, control, layer, reals, step, cos, sin, rotary)
    if apart:
        _lead_rows(sizes, control, layer, reals, step, LEAVE, x, out)
    for start in range(0, together, CHUNK):
        rows, skip = min(CHUNK, tokens - start), 2 * start * hidden
        source = step[MIXED] + 2 * start * mixed
        if layer[NORM_BEFORE]:
            _product(sizes, control, layer, source, rows, mixed, OUTPUT, 0, step[NORMED], hidden, NONE)
            _norm(sizes, control, layer, reals, 1, step[NORMED], step[RESIDUAL], x + skip, rows)
            _norm(sizes, control, layer, reals, 2, step[RESIDUAL], step[NORMED], 0, rows)
        else:
            _product(sizes, control, layer, source, rows, mixed, OUTPUT, x + skip, step[RESIDUAL], hidden, NONE)
            _norm(sizes, control, layer, reals, 1, step[RESIDUAL], step[NORMED], 0, rows)
        _product(sizes, control, layer, step[NORMED], rows, hidden, GATE_UP, 0, step[GATED], layer[INNER], layer[KIND])
        if layer[NORM_BEFORE]:
            _product(sizes, control, layer, step[GATED], rows, layer[INNER], DOWN, 0, step[NORMED], hidden, NONE)
            _norm(sizes, control, layer, reals, 3, step[NORMED], out + skip, step[RESIDUAL], rows)
        else:
            _product(
                sizes, control, layer, step[GATED], rows, layer[INNER], DOWN, step[RESIDUAL], out + skip, hidden, NONE
            )
    store_release(control, LEADING, 0)


@njit(nogil=True, cache=True)
def run_product(sizes, control, x, rows, depth, weight, bias, out, features, tiles):
    """out [rows, features] = x [rows, depth] W^T + bias, for a product outside of the layers; see product.py."""
    control[X], control[OUT], control[ROWS], control[ADD], control[DEPTH] = x, out, rows, 0, depth
    control[WEIGHT], control[BIAS], control[FEATURES], control[FOLLOWED_BY] = weight, bias, features, NONE
    control[WITH_TILES] = tiles
    control[COMING], control[COMING_FEATURES], control[COMING_DEPTH] = weight, features, depth
    lead(sizes, control, PRODUCT, _shares(control))


@njit(inline="always")
def lead(sizes, control, phase, pieces):
    """Have the job in control[JOB:] done in so many pieces; returns when all are."""
    control[PHASE], control[PIECES] = phase, pieces
    if pieces == 1 or control[THREADS] == 1:
        for piece in range(pieces):
            run_piece(sizes, control, piece)
        return
    publish(control, pieces)
    while True:
        piece = claim(control)
        if piece < 0:
            break
        run_piece(sizes, control, piece)
        fetch_add(control, DONE, 1)
    wait_for(control, pieces)


@njit(nogil=True, cache=True)
def follow(sizes, control):
    """Take part in whatever is led, until nothing has been for a while or control[STOP] is set."""
    idle = 0
    while idle < SPINS and load_acquire(control, STOP) == 0:
        piece = claim(control)
        if piece >= 0:
            run_piece(sizes, control, piece)
            fetch_add(control, DONE, 1)
            idle = 0
        else:
            idle = 0 if load_acquire(control, LEADING) else idle + 1
            relax()


@njit(nogil=True, cache=True)
def run_piece(sizes, control, piece):
    """One piece of the job."""
    phase = control[PHASE]
    if phase == PRODUCT:
        _product_piece(control, piece)
    elif phase == NORM:
        _norm_piece(control, piece)
    elif phase == TURN:
        _turn_piece(control, piece)
    elif phase == ATTEND:
        _attend_piece(sizes, control, piece)
    elif phase == ENTER:
        _enter_piece(control, piece)
    else:
        _leave_piece(control, piece)


@njit(inline="always")
def _shares(control):
    # One piece of a product for each thread: then most get the part of a weight whose beginning they have fetched.
    return control[THREADS]


@njit(inline="always")
def _part(count, control, piece):
    """The range of `count` things that is a piece's."""
    return count * piece // control[PIECES], count * (piece + 1) // control[PIECES]


@njit(inline="always")
def _product(sizes, control, layer, x, rows, depth, which, add, out, features, kind):
    """`which`: the place of the weight in `layer`, before that of its bias."""
    control[X], control[OUT], control[ROWS], control[ADD], control[DEPTH] = x, out, rows, add, depth
    control[WEIGHT], control[BIAS], control[FEATURES] = layer[which], layer[which + 1], features
    control[FOLLOWED_BY], control[WITH_TILES] = kind, layer[TILES]
    if which == QKV:
        _announce(control, layer[OUTPUT], layer[HIDDEN], layer[HEADS] * layer[DIM])
    elif which == OUTPUT:
        _announce(control, layer[GATE_UP], layer[INNER], layer[HIDDEN])
    elif which == GATE_UP:
        _announce(control, layer[DOWN], layer[HIDDEN], layer[INNER])
    else:
        _announce(control, layer[AFTER], layer[AFTER_FEATURES], layer[AFTER_DEPTH])
    lead(sizes, control, PRODUCT, _shares(control))


@njit(inline="always")
def _announce(control, weight, features, depth):
    """Which weight is the next to be read."""
    control[COMING], control[COMING_FEATURES], control[COMING_DEPTH] = weight, features, depth


@njit(inline="always")
def _product_piece(control, piece):
    x, out, rows, add, depth = control[X], control[OUT], control[ROWS], control[ADD], control[DEPTH]
    weight, bias, features, kind = control[WEIGHT], control[BIAS], control[FEATURES], control[FOLLOWED_BY]
    panel = matrix.PANEL if control[WITH_TILES] else product.PANEL
    first, last = _part(features // panel, control, piece)
    start, _ = _part(control[COMING_FEATURES] // panel, control, piece)
    coming = control[COMING] + 2 * start * panel * control[COMING_DEPTH]
    if control[WITH_TILES]:
        matrix.product(x, depth, rows, depth, weight, bias, add, out, features, kind, first, last, coming)
    else:
        product.product(x, depth, rows, depth, weight, bias, add, out, features, kind, first, last, coming)


@njit(inline="always")
def _norm(sizes, control, layer, reals, which, x, out, add, rows):
    """out = norm(x) [+ add], by the norm of that number."""
    control[X], control[OUT], control[ROWS], control[ADD] = x, out, rows, add
    control[NORM_WEIGHT], control[NORM_WIDTH] = layer[NORM_INPUT + which], layer[HIDDEN]
    control[NORM_REAL], control[NORM_REALS] = EPS + which, reals.ctypes.data
    lead(sizes, control, NORM, 1 if rows <= FEW_ROWS else _shares(control))


@njit(inline="always")
def _norm_piece(control, piece):
    rows, width = control[ROWS], control[NORM_WIDTH]
    first, last = _part(rows, control, piece)
    skip = 2 * first * width
    eps = carray(doubles_at(control[NORM_REALS]), (REALS,))[control[NORM_REAL]]
    add = control[ADD] + skip if control[ADD] else 0
    _norm_rows(control[X] + skip, control[OUT] + skip, last - first, width, control[NORM_WEIGHT], eps, add)


@njit(inline="always", fastmath=True, error_model="numpy")
def _norm_rows(x, out, rows, width, weight, eps, add):
    """out [rows, width] = norm(x) [+ add], all bfloat16 at addresses."""
    source, target = carray(halves_at(x), (rows, width)), carray(halves_at(out), (rows, width))
    rms_norm(source, carray(floats_at(weight), (width,)), eps, target)
    if add:
        others = carray(halves_at(add), (rows, width))
        for t in range(rows):
            row, other = target[t], others[t]
            for i in range(row.shape[0]):
                row[i] = narrow(widen(row[i]) + widen(other[i]), row[i])


@njit(inline="always")
def _lead_rows(sizes, control, layer, reals, step, phase, x, out):
    """Have what comes before or after the attention done, some rows in each piece."""
    threads = control[THREADS]
    control[X], control[OUT], control[ROWS] = x, out, step[TOKENS]
    control[LAYER], control[REAL], control[STEP] = layer.ctypes.data, reals.ctypes.data, step.ctypes.data
    lead(sizes, control, phase, threads * ((step[TOKENS] + CHUNK * threads - 1) // (CHUNK * threads)))


@njit(inline="always")
def _enter_piece(control, piece):
    """Norm and QKV of some rows."""
    layer = carray(longs_at(control[LAYER]), (LAYER_WORDS,))
    reals = carray(doubles_at(control[REAL]), (REALS,))
    step = carray(longs_at(control[STEP]), (STEP_WORDS,))
    first, last = _part(control[ROWS], control, piece)
    rows, hidden, heads = last - first, layer[HIDDEN], _heads_width(layer)
    normed = step[NORMED] + 2 * first * hidden
    _norm_rows(control[X] + 2 * first * hidden, normed, rows, hidden, layer[NORM_INPUT], reals[EPS], 0)
    target = step[HEADS_OUT] + 2 * first * heads
    _whole_product(layer, normed, rows, hidden, QKV, 0, target, heads, NONE, layer[OUTPUT])


@njit(inline="always")
def _leave_piece(control, piece):
    """From the output product to the end of the layer, for some rows."""
    layer = carray(longs_at(control[LAYER]), (LAYER_WORDS,))
    reals = carray(doubles_at(control[REAL]), (REALS,))
    step = carray(longs_at(control[STEP]), (STEP_WORDS,))
    first, last = _part(control[ROWS], control, piece)
    rows, hidden, inner = last - first, layer[HIDDEN], layer[INNER]
    mixed = layer[HEADS] * layer[DIM]
    skip, source = 2 * first * hidden, step[MIXED] + 2 * first * mixed
    x, out, normed, residual = control[X] + skip, control[OUT] + skip, step[NORMED] + skip, step[RESIDUAL] + skip
    gated = step[GATED] + 2 * first * inner
    if layer[NORM_BEFORE]:
        _whole_product(layer, source, rows, mixed, OUTPUT, 0, normed, hidden, NONE, layer[GATE_UP])
        _norm_rows(normed, residual, rows, hidden, layer[NORM_ATTENTION], reals[EPS + 1], x)
        _norm_rows(residual, normed, rows, hidden, layer[NORM_BEFORE], reals[EPS + 2], 0)
    else:
        _whole_product(layer, source, rows, mixed, OUTPUT, x, residual, hidden, NONE, layer[GATE_UP])
        _norm_rows(residual, normed, rows, hidden, layer[NORM_ATTENTION], reals[EPS + 1], 0)
    _whole_product(layer, normed, rows, hidden, GATE_UP, 0, gated, inner, layer[KIND], layer[DOWN])
    if layer[NORM_BEFORE]:
        _whole_product(layer, gated, rows, inner, DOWN, 0, normed, hidden, NONE, layer[AFTER])
        _norm_rows(normed, out, rows, hidden, layer[NORM_AFTER], reals[EPS + 3], residual)
    else:
        _whole_product(layer, gated, rows, inner, DOWN, residual, out, hidden, NONE, layer[AFTER])


@njit(inline="always")
def _whole_product(layer, x, rows, depth, which, add, out, features, kind, coming):
    """All panels of a product; `which` as in `_product`, `coming` the weight of the next one."""
    weight, bias = layer[which], layer[which + 1]
    if layer[TILES]:
        panels = features // matrix.PANEL
        matrix.product(x, depth, rows, depth, weight, bias, add, out, features, kind, 0, panels, coming)
    else:
        panels = features // product.PANEL
        product.product(x, depth, rows, depth, weight, bias, add, out, features, kind, 0, panels, coming)


@njit(inline="always")
def _heads_width(layer):
    """Elements of the heads of a token."""
    return (layer[HEADS] + 2 * layer[KV_HEADS]) * layer[DIM]


@njit(inline="always")
def _attention(sizes, control, layer, reals, step, cos, sin, rotary):
    control[X], control[OUT], control[ROWS] = step[HEADS_OUT], step[MIXED], step[TOKENS]
    control[LAYER], control[REAL], control[STEP] = layer.ctypes.data, reals.ctypes.data, step.ctypes.data
    control[COS], control[SIN], control[ROTARY] = cos, sin, rotary
    lead(sizes, control, TURN, 1 if step[TOKENS] <= FEW_ROWS else _shares(control))
    if step[SHARED_PIECES]:
        control[IS_SHARED] = 1
        lead(sizes, control, ATTEND, step[SHARED_PIECES])
    control[IS_SHARED] = 0
    lead(sizes, control, ATTEND, step[OWN_PIECES])


@njit(inline="always")
def _turn_piece(control, piece):
    """RoPE in place, and K and V to their pages."""
    layer = carray(longs_at(control[LAYER]), (LAYER_WORDS,))
    reals = carray(doubles_at(control[REAL]), (REALS,))
    step = carray(longs_at(control[STEP]), (STEP_WORDS,))
    tokens, q_heads, kv_heads, dim = step[TOKENS], layer[HEADS], layer[KV_HEADS], layer[DIM]
    first, last = _part(tokens, control, piece)
    heads = carray(halves_at(control[X]), (tokens, q_heads + 2 * kv_heads, dim))[first:last]
    if layer[ROTATES]:
        cos = carray(halves_at(control[COS]), (tokens, control[ROTARY]))[first:last]
        sin = carray(halves_at(control[SIN]), (tokens, control[ROTARY]))[first:last]
        turning, normed = q_heads + kv_heads, layer[HEAD_NORMS] != 0
        norms = carray(floats_at(layer[HEAD_NORMS]), (turning if normed else 0, dim))
        rotate(heads[:, :turning], cos, sin, norms, reals[HEAD_EPS])
    slots = carray(longs_at(step[SLOT_MAPPING]), (tokens,))[first:last]
    keys, values = heads[:, q_heads : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
    write_pages(keys, values, _key_pages(layer), _value_pages(layer), slots, layer[BLOCK_SIZE])


@njit(inline="always")
def _attend_piece(sizes, control, piece):
    layer = carray(longs_at(control[LAYER]), (LAYER_WORDS,))
    reals = carray(doubles_at(control[REAL]), (REALS,))
    step = carray(longs_at(control[STEP]), (STEP_WORDS,))
    tokens, q_heads, dim = step[TOKENS], layer[HEADS], layer[DIM]
    where, cut = (SHARED, SHARED_CUTS) if control[IS_SHARED] else (OWN, OWN_CUTS)
    cuts = carray(longs_at(step[cut]), (control[PIECES] + 1,))
    spans = carray(longs_at(step[where]), (cuts[control[PIECES]], 6))[cuts[piece] : cuts[piece + 1]]
    state = (tokens, q_heads)
    attend(
        sizes,
        layer[BLOCK_SIZE],
        carray(halves_at(control[X]), (tokens, q_heads + 2 * layer[KV_HEADS], dim))[:, :q_heads],
        _key_pages(layer),
        _value_pages(layer),
        np.empty((0, 0, 0, 0), dtype=np.float32),
        carray(ints_at(step[TABLES]), (step[TABLE_ROWS], step[TABLE_COLUMNS])),
        carray(longs_at(step[ORDER]), (step[ORDER_LENGTH],)),
        carray(longs_at(step[POSITIONS]), (tokens,)),
        layer[WINDOW],
        reals[SCALE],
        reals[SOFTCAP],
        carray(floats_at(layer[SINKS]), (q_heads if layer[SINKS] else 0,)),
        spans,
        carray(bytes_at(step[JOINED]), (tokens,)),
        carray(floats_at(step[TOPS]), state),
        carray(floats_at(step[TOTALS]), state),
        carray(floats_at(step[SUMS]), (tokens, q_heads, layer[WIDTH])),
        carray(halves_at(control[OUT]), (tokens, q_heads, dim)),
    )


@njit(inline="always")
def _key_pages(layer):
    shape = (layer[BLOCKS], layer[KV_HEADS], layer[PANELS], layer[PAIRS], layer[LANES], 2)
    return carray(halves_at(layer[K_PAGES]), shape)


@njit(inline="always")
def _value_pages(layer):
    shape = (layer[BLOCKS], layer[KV_HEADS], layer[PANELS] * layer[LANES] // 2, layer[WIDTH], 2)
    return carray(halves_at(layer[V_PAGES]), shape)
