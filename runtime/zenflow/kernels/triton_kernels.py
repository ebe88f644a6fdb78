"""Triton kernels over tiles of n columns × rows; `zenflow.kernels.triton_launch` starts them.

The arithmetic is that of `zenflow.rules`, each operation rounded by itself: they are to be started with
`enable_fp_fusion=False`, which keeps LLVM and ptxas from contracting, and divide and take roots by IEEE's rules.
bf16 crosses memory as int16 and is converted here bit by bit, so that every backend rounds alike.

An address is an int64: a weight may have more than 2^31 elements.
"""
# Triton's annotations are not types, and its decorator has none.
# What the compiler takes as a constant is in capitals.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803, SIM108

import triton
import triton.language as tl

# Triton compiles a kernel anew for an integer that is 1, or the first that is a multiple of 16, and likewise for a
# pointer. These change with every selection, or are parts of what all weights have together, and nothing is gained.
_VARYING = ["n", "columns", "count", "updated", "rate", "inverse_root", "factor", "skip"]


@triton.jit
def widened(raw, BF16: tl.constexpr):
    """Elements as fp32."""
    if BF16:
        wide = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = raw.to(tl.float32)
    return wide


@triton.jit
def narrowed(value, element: tl.constexpr, BF16: tl.constexpr):
    """fp32 in another dtype, rounded to nearest even; NaN stays NaN."""
    if BF16:
        bits = value.to(tl.int32, bitcast=True)
        # NaN before the sum: it could overflow, and rounding could make it infinite.
        bits = tl.where(value == value, bits, 0x7FC00000)
        narrow = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).to(tl.int16)
    else:
        narrow = value.to(element)
    return narrow


@triton.jit
def tile_of(rows, n, ROWS_FIRST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    """The program's columns and rows, and which of them exist."""
    program = tl.program_id(0).to(tl.int64)
    if ROWS_FIRST:  # neighbouring programs share memory lines
        blocks = (rows + BLOCK_R - 1) // BLOCK_R
        block_n, block_r = program // blocks, program % blocks
    else:
        blocks = (n + BLOCK_N - 1) // BLOCK_N
        block_n, block_r = program % blocks, program // blocks
    i = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    r = block_r * BLOCK_R + tl.arange(0, BLOCK_R)
    return i, r, i < n, r < rows


@triton.jit
def column_numbers(columns, i, i_ok):
    """The matrix column in each place."""
    if columns is None:
        numbers = i
    else:
        numbers = tl.load(columns + i, mask=i_ok, other=0).to(tl.int64)
    return numbers


@triton.jit
def load_columns(matrix, numbers, r, i_ok, r_ok, stride_row, stride_column, ROWS_FIRST: tl.constexpr):
    """A tile [n, rows] of a matrix; neighbouring threads read along the dimension that is contiguous."""
    if ROWS_FIRST:
        at = matrix + numbers[:, None] * stride_column + r[None, :] * stride_row
        tile = tl.load(at, mask=i_ok[:, None] & r_ok[None, :], other=0)
    else:
        at = matrix + r[:, None] * stride_row + numbers[None, :] * stride_column
        tile = tl.trans(tl.load(at, mask=r_ok[:, None] & i_ok[None, :], other=0))
    return tile


@triton.jit
def store_columns(matrix, tile, numbers, r, i_ok, r_ok, stride_row, stride_column, ROWS_FIRST: tl.constexpr):
    """Write a tile [n, rows] into a matrix."""
    if ROWS_FIRST:
        at = matrix + numbers[:, None] * stride_column + r[None, :] * stride_row
        tl.store(at, tile, mask=i_ok[:, None] & r_ok[None, :])
    else:
        at = matrix + r[:, None] * stride_row + numbers[None, :] * stride_column
        tl.store(at, tl.trans(tile), mask=r_ok[:, None] & i_ok[None, :])


@triton.jit
def column_sums(
    matrix,
    sums,
    rows,
    n,
    part_rows,
    stride_row,
    stride_column,
    FINITE: tl.constexpr,
    BF16: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Sums of the squares in a matrix' columns over parts of its rows: sums[part, n].

    Grid: blocks of columns, parts. No atomics, so that the order of summation is that of the shape. FINITE: a sum that
    is not finite counts as 0.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_ok = i < n
    part = tl.program_id(1).to(tl.int64)
    low = part * part_rows
    high = tl.minimum(low + part_rows, rows)
    total = tl.full((BLOCK_N, BLOCK_R), 0.0, tl.float32)
    for start in range(low, high, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R).to(tl.int64)  # the interpreter's `start` is a number without a width
        raw = load_columns(matrix, i, r, i_ok, r < high, stride_row, stride_column, ROWS_FIRST)
        value = widened(raw, BF16)
        total += value * value
    column = tl.sum(total, axis=1)
    if FINITE:
        column = tl.where(column < float("inf"), column, 0.0)  # no NaN is less
    tl.store(sums + part * n + i, column, mask=i_ok)


@triton.jit(do_not_specialize=_VARYING)
def pack_columns(
    matrix,
    columns,
    packed,
    n,
    rows,
    stride_row,
    stride_column,
    ROWS_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """packed[n, rows] = matrix[:, columns] transposed, elements as integers of their width."""
    i, r, i_ok, r_ok = tile_of(rows, n, ROWS_FIRST, BLOCK_N, BLOCK_R)
    numbers = column_numbers(columns, i, i_ok)
    tile = load_columns(matrix, numbers, r, i_ok, r_ok, stride_row, stride_column, ROWS_FIRST)
    tl.store(packed + i[:, None] * rows + r[None, :], tile, mask=i_ok[:, None] & r_ok[None, :])


@triton.jit(do_not_specialize=_VARYING)
def scatter_columns(
    matrix,
    columns,
    source,
    n,
    rows,
    stride_row,
    stride_column,
    CONVERT: tl.constexpr,
    BF16: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """matrix[:, columns] = source[n, rows] transposed. CONVERT: the source is fp32, the matrix is something else."""
    i, r, i_ok, r_ok = tile_of(rows, n, ROWS_FIRST, BLOCK_N, BLOCK_R)
    numbers = column_numbers(columns, i, i_ok)
    tile = tl.load(source + i[:, None] * rows + r[None, :], mask=i_ok[:, None] & r_ok[None, :], other=0)
    if CONVERT:
        tile = narrowed(tile, matrix.dtype.element_ty, BF16)
    store_columns(matrix, tile, numbers, r, i_ok, r_ok, stride_row, stride_column, ROWS_FIRST)


@triton.jit
def adam_step(w, m, v, g, step_size, inverse_root, mix1, keep, mix2, eps):
    """AdamW, Adam."""
    m = m + (g - m) * mix1
    v = v * keep + (g * mix2) * g
    w = w - tl.div_rn(m * step_size, tl.sqrt_rn(v) * inverse_root + eps)
    return w, m, v


@triton.jit
def adagrad_step(w, s, g, rate, eps):
    """Adagrad."""
    s = s + g * g
    w = w - tl.div_rn(g * rate, tl.sqrt_rn(s) + eps)
    return w, s


@triton.jit
def lion_step(w, m, g, lr, mix1, mix2):
    """Lion; the sign of NaN is NaN."""
    change = g - m
    mixed = change * mix1 + m
    sign = tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, tl.where(mixed == 0, 0.0, mixed)))
    w = w - sign * lr
    m = m + change * mix2
    return w, m


@triton.jit
def sgd_step(w, b, g, updated, lr, keep, mix1, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr):
    """SGD; the momentum begins with the whole gradient."""
    if MOMENTUM:
        b = tl.where(updated == 1, g, b * keep + g * mix1)
        if NESTEROV:
            g = g + b * keep
        else:
            g = b
    return w - g * lr, b


@triton.jit
def rule_step(
    w, m, v, g, rate, inverse_root, updated, lr, decay, weight_decay, eps, mix1, mix2, keep,
    RULE: tl.constexpr, L2: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """The new weights and moments; a moment that the rule does not have stays."""
    if L2:
        g = g + w * weight_decay
    w = w * decay
    if RULE == "adam":
        w, m, v = adam_step(w, m, v, g, rate, inverse_root, mix1, keep, mix2, eps)
    elif RULE == "adagrad":
        w, m = adagrad_step(w, m, g, rate, eps)
    elif RULE == "lion":
        w, m = lion_step(w, m, g, lr, mix1, mix2)
    else:
        w, m = sgd_step(w, m, g, updated, lr, keep, mix1, MOMENTUM, NESTEROV)
    return w, m, v


@triton.jit
def scaled(g, factor):
    """The gradient times the step's factor, where there is one."""
    if factor is not None:
        g = g * tl.load(factor)
    return g


@triton.jit
def column_scalars(scalars, i, i_ok):
    """[n, 1] numbers of the columns; 0 where there are none."""
    if scalars is None:
        found = tl.full((i.shape[0], 1), 0.0, tl.float32)
    else:
        found = tl.load(scalars + i, mask=i_ok, other=0)[:, None]
    return found


@triton.jit
def load_state(stream, place, ok):
    """A tile of a state's stream; 0 where there is none."""
    if stream is None:
        tile = tl.full((place.shape[0], place.shape[1]), 0.0, tl.float32)
    else:
        tile = tl.load(stream + place, mask=ok, other=0.0)
    return tile


@triton.jit
def store_state(stream, place, ok, new, old, skip):
    """Write a tile of a state's stream, or what was there, and say which it was."""
    if skip is not None:
        new = tl.where(tl.load(skip), old, new)
    if stream is not None:
        tl.store(stream + place, new, mask=ok)
    return new


@triton.jit
def store_count(count, updated, i, i_ok, r, skip):
    """Write the new update counts; the other blocks of rows read only `updated`."""
    if count is not None:
        ok = i_ok & (tl.min(r, axis=0) == 0)
        if skip is not None:
            ok = ok & (tl.load(skip) == 0)
        tl.store(count + i, tl.load(updated + i, mask=i_ok, other=0), mask=ok)


@triton.jit(do_not_specialize=_VARYING)
def update_columns(
    gradient,
    weights,
    columns,
    master,
    first,
    second,
    count,
    updated,
    rate,
    inverse_root,
    factor,
    skip,
    n,
    rows,
    gradient_stride_row,
    gradient_stride_column,
    weights_stride_row,
    weights_stride_column,
    lr,
    decay,
    weight_decay,
    eps,
    mix1,
    mix2,
    keep,
    RULE: tl.constexpr,
    L2: tl.constexpr,
    NESTEROV: tl.constexpr,
    GRADIENT_BF16: tl.constexpr,
    WEIGHTS_BF16: tl.constexpr,
    GRADIENT_ROWS_FIRST: tl.constexpr,
    WEIGHTS_ROWS_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One update of n columns: gradient gathered, state updated, weights written, each read and written once.

    Pointers that are None are left out: weights, columns, moments and counts that the rule leaves alone, factor, skip.
    `updated` is [n] int32, the counts with this update; `rate` and `inverse_root` are [n] fp32, made from them.
    """
    i, r, i_ok, r_ok = tile_of(rows, n, GRADIENT_ROWS_FIRST, BLOCK_N, BLOCK_R)
    numbers = column_numbers(columns, i, i_ok)
    raw = load_columns(
        gradient, numbers, r, i_ok, r_ok, gradient_stride_row, gradient_stride_column, GRADIENT_ROWS_FIRST
    )
    g = scaled(widened(raw, GRADIENT_BF16), factor)
    at, ok = i[:, None] * rows + r[None, :], i_ok[:, None] & r_ok[None, :]
    w, m, v = load_state(master, at, ok), load_state(first, at, ok), load_state(second, at, ok)
    rates, roots = column_scalars(rate, i, i_ok), column_scalars(inverse_root, i, i_ok)
    new_w, new_m, new_v = rule_step(
        w, m, v, g, rates, roots, column_scalars(updated, i, i_ok), lr, decay, weight_decay, eps, mix1, mix2, keep,
        RULE, L2, first is not None, NESTEROV,
    )  # fmt: skip
    store_state(first, at, ok, new_m, m, skip)
    store_state(second, at, ok, new_v, v, skip)
    store_count(count, updated, i, i_ok, r, skip)
    kept = store_state(master, at, ok, new_w, w, skip)
    if weights is not None:
        tile = narrowed(kept, weights.dtype.element_ty, WEIGHTS_BF16)
        store_columns(
            weights, tile, numbers, r, i_ok, r_ok, weights_stride_row, weights_stride_column, WEIGHTS_ROWS_FIRST
        )
