"""Triton kernels over all weights of a bucket, or of the model; `zenflow.kernels.triton_launch` starts them.

What is fixed lies in tables on the device (`zenflow.kernels.tables`); addresses of gradients and weights, which change,
are arguments. A tile is read where the gradient is contiguous and written where a column's run is contiguous, so that
both go in pieces of 16 bytes if EVEN: sizes and starts are multiples of 16 elements, all memory is aligned to 16 bytes.

Elements cross memory as integers of their width. No argument is specialized: a variant is made for ELEMENT, EVEN and
TRANSPOSED (weights and gradients stored [columns, rows]) alone.

The arithmetic is that of `zenflow.rules`, each operation rounded by itself: kernels are started with
`enable_fp_fusion=False`, which keeps LLVM and ptxas from contracting, and divide and take roots by IEEE's rules. Every
backend rounds alike: bf16 is converted bit by bit.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: N803, SIM108

import triton
import triton.language as tl

_PACKED = [
    "a0",
    "a1",
    "a2",
    "a3",
    "a4",
    "a5",
    "a6",
    "a7",
    "tiles",
    "records",
    "places",
    "sent",
    "kept",
    "partials",
    "signs",
]


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
def chosen(which, a0, a1, a2, a3, a4, a5, a6, a7):
    """One of a launch's addresses."""
    low = tl.where(which < 2, tl.where(which == 0, a0, a1), tl.where(which == 2, a2, a3))
    high = tl.where(which < 6, tl.where(which == 4, a4, a5), tl.where(which == 6, a6, a7))
    return tl.where(which < 4, low, high)


@triton.jit
def elements(address, ELEMENT: tl.constexpr, EVEN: tl.constexpr):
    """An address, or a pointer of any kind, as a pointer to integers of the elements' width."""
    if ELEMENT == "fp32":
        pointer = address.to(tl.pointer_type(tl.int32))
    else:
        pointer = address.to(tl.pointer_type(tl.int16))
    if EVEN:
        pointer = tl.multiple_of(pointer, 16)  # of the address itself the compiler would forget it
    return pointer


@triton.jit
def values(raw, ELEMENT: tl.constexpr):
    """Elements as fp32."""
    if ELEMENT == "bf16":
        wide = widened(raw, True)
    elif ELEMENT == "fp16":
        wide = raw.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        wide = raw.to(tl.float32, bitcast=True)
    return wide


@triton.jit
def raw_of(value, ELEMENT: tl.constexpr):
    """fp32 as elements, rounded to nearest even."""
    if ELEMENT == "bf16":
        raw = narrowed(value, tl.int16, True)
    elif ELEMENT == "fp16":
        raw = narrowed(value, tl.float16, False).to(tl.int16, bitcast=True)
    else:
        raw = value.to(tl.int32, bitcast=True)
    return raw


@triton.jit
def field(record, PLACE: tl.constexpr, EVEN: tl.constexpr):
    """One number of a record."""
    number = tl.load(record + PLACE)
    if EVEN:
        number = tl.multiple_of(number, 16)
    return number


@triton.jit
def tile_at(
    program, tiles, records,
    EVEN: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The program's part and the corner of its tile; neighbouring programs share what is contiguous."""
    which = tl.load(tiles + 2 * program)
    at = tl.load(tiles + 2 * program + 1)
    record = records + which * 8
    rows = field(record, 0, EVEN).to(tl.int32)
    columns = field(record, 1, EVEN and not TRANSPOSED).to(tl.int32)
    if TRANSPOSED:
        blocks = (rows + BLOCK_R - 1) // BLOCK_R
        r0, c0 = (at % blocks) * BLOCK_R, (at // blocks) * BLOCK_C
    else:
        blocks = (columns + BLOCK_C - 1) // BLOCK_C
        r0, c0 = (at // blocks) * BLOCK_R, (at % blocks) * BLOCK_C
    return which, record, rows, columns, r0, c0


@triton.jit(do_not_specialize=_PACKED)
def pack_bucket(
    a0: tl.int64, a1: tl.int64, a2: tl.int64, a3: tl.int64, a4: tl.int64, a5: tl.int64, a6: tl.int64, a7: tl.int64,
    tiles, records, places, sent, kept, partials, signs,
    ELEMENT: tl.constexpr, EVEN: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    SIGNS: tl.constexpr,
):  # fmt: skip
    """Each column's run into its place, and the sum of squares of each BLOCK_R rows of it into `partials`.

    If SIGNS those of the columns that are sent into `signs`. A part whose address is 0 is left out.
    """
    which, record, rows, columns, r0, c0 = tile_at(tl.program_id(0), tiles, records, EVEN, TRANSPOSED, BLOCK_R, BLOCK_C)
    address = chosen(which % 8, a0, a1, a2, a3, a4, a5, a6, a7)
    if address != 0:
        gradient = elements(address.to(tl.int64), ELEMENT, EVEN)
        r, c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
        r_ok, c_ok = r < rows - r0, c < columns - c0
        place = tl.load(places + tl.load(record + 2) + c0 + c, mask=c_ok, other=0).to(tl.int64)
        to_sent = elements(sent, ELEMENT, EVEN) + field(record, 3, EVEN)
        to_kept = elements(kept, ELEMENT, EVEN) + field(record, 4, EVEN)
        run = tl.where(place >= 0, to_sent + place * rows, to_kept + (-1 - place) * rows)[:, None] + r0 + r[None, :]
        if TRANSPOSED:
            corner = gradient + c0.to(tl.int64) * rows + r0
            tile = tl.load(corner + c[:, None] * rows + r[None, :], mask=c_ok[:, None] & r_ok[None, :], other=0)
            wide = values(tile, ELEMENT)
            sums = tl.sum(wide * wide, axis=1)
        else:
            corner = gradient + r0.to(tl.int64) * columns + c0
            raw = tl.load(corner + r[:, None] * columns + c[None, :], mask=r_ok[:, None] & c_ok[None, :], other=0)
            wide = values(raw, ELEMENT)
            sums = tl.sum(wide * wide, axis=0)
            tile = tl.trans(raw)
        tl.store(run, tile, mask=c_ok[:, None] & r_ok[None, :])
        if SIGNS:
            runs = wide if TRANSPOSED else tl.trans(wide)
            codes = tl.where(runs > 0, 1, tl.where(runs < 0, 2, 0))
            fours = tl.reshape(codes, (BLOCK_C, BLOCK_R // 4, 4)) << (2 * tl.arange(0, 4))[None, None, :]
            four = r0 // 4 + tl.arange(0, BLOCK_R // 4)
            width = (rows + 3) // 4
            of_column = signs + tl.load(record + 6) + tl.where(place >= 0, place, 0) * width
            ok = (c_ok & (place >= 0))[:, None] & (four < width)[None, :]
            tl.store(of_column[:, None] + four[None, :], tl.sum(fours, axis=2).to(tl.uint8), mask=ok)
        block = (r0 // BLOCK_R).to(tl.int64)
        tl.store(partials + tl.load(record + 5) + block * columns + c0 + c, sums, mask=c_ok)


@triton.jit(do_not_specialize=["present", "tiles", "records", "partials", "energies"])
def sum_partials(
    present: tl.int64, tiles, records, partials, energies, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """energies[all columns]: a column's partial sums from first to last; parts whose bit is 0 are left out."""
    program = tl.program_id(0)
    which = tl.load(tiles + 2 * program)
    if (present.to(tl.int64) >> (which % 64)) & 1 != 0:
        record = records + which * 8
        rows, columns = tl.load(record).to(tl.int32), tl.load(record + 1).to(tl.int32)
        c = tl.load(tiles + 2 * program + 1) * BLOCK_C + tl.arange(0, BLOCK_C)
        start = partials + tl.load(record + 5) + c
        total = tl.full((BLOCK_C,), 0.0, tl.float32)
        for block in range((rows + BLOCK_R - 1) // BLOCK_R):
            total += tl.load(start + block * columns.to(tl.int64), mask=c < columns, other=0.0)
        tl.store(energies + tl.load(record + 2) + c, total, mask=c < columns)


@triton.jit(do_not_specialize=[*_PACKED[:8], "tiles", "records", "places", "arrived"])
def show_bucket(
    a0: tl.int64, a1: tl.int64, a2: tl.int64, a3: tl.int64, a4: tl.int64, a5: tl.int64, a6: tl.int64, a7: tl.int64,
    tiles, records, places, arrived,
    ELEMENT: tl.constexpr, EVEN: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Runs that have arrived into the weights' columns.

    Where a row is contiguous, whole pieces of 16 bytes are read and written if EVEN: the columns between those that
    arrive are written as they were read. All that writes weights has to be in the order of one stream.
    """
    which, record, rows, columns, r0, c0 = tile_at(tl.program_id(0), tiles, records, EVEN, TRANSPOSED, BLOCK_R, BLOCK_C)
    address = chosen(which % 8, a0, a1, a2, a3, a4, a5, a6, a7)
    if address != 0:
        weights = elements(address.to(tl.int64), ELEMENT, EVEN)
        r, c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
        r_ok, c_ok = r < rows - r0, c < columns - c0
        place = tl.load(places + tl.load(record + 2) + c0 + c, mask=c_ok, other=-1).to(tl.int64)
        comes = place >= 0
        start = elements(arrived, ELEMENT, EVEN) + field(record, 3, EVEN) + r0
        new = tl.load(
            start + (tl.where(comes, place, 0) * rows)[:, None] + r[None, :],
            mask=comes[:, None] & r_ok[None, :],
            other=0,
        )
        if TRANSPOSED:
            corner = weights + c0.to(tl.int64) * rows + r0
            tl.store(corner + c[:, None] * rows + r[None, :], new, mask=comes[:, None] & r_ok[None, :])
        else:
            at = weights + r0.to(tl.int64) * columns + c0 + r[:, None] * columns + c[None, :]
            there = r_ok[:, None] & c_ok[None, :]
            if EVEN:
                tl.store(at, tl.where(comes[None, :], tl.trans(new), tl.load(at, mask=there, other=0)), mask=there)
            else:  # element by element in any case
                tl.store(at, tl.trans(new), mask=there & comes[None, :])


@triton.jit(do_not_specialize=["tiles", "records", "factor", "skip"])
def guess_columns(
    tiles, records, factor, skip,
    ELEMENT: tl.constexpr, EVEN: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Move the columns that were sent, of weights in any bucket, against the signs of their gradients.

    records: [parts, 8] int64: rows, columns, addresses of the weight, the columns' places and the signs of slot 0, and
    the bits of the length in fp32. Where a row is contiguous, columns between these are written as they were read.
    """
    _, record, rows, columns, r0, c0 = tile_at(tl.program_id(0), tiles, records, EVEN, TRANSPOSED, BLOCK_R, BLOCK_C)
    weights = elements(tl.load(record + 2), ELEMENT, EVEN)
    places, signs = tl.load(record + 3).to(tl.pointer_type(tl.int32)), tl.load(record + 4).to(tl.pointer_type(tl.uint8))
    length = tl.load(record + 5).to(tl.int32).to(tl.float32, bitcast=True)
    r, c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    r_ok, c_ok = r < rows - r0, c < columns - c0
    place = tl.load(places + c0 + c, mask=c_ok, other=-1).to(tl.int64)
    comes = place >= 0
    four, width = r0 // 4 + tl.arange(0, BLOCK_R // 4), (rows + 3) // 4
    of_column = signs + tl.where(comes, place, 0) * width
    fours = tl.load(of_column[:, None] + four[None, :], mask=comes[:, None] & (four < width)[None, :], other=0)
    codes = (fours.to(tl.int32)[:, :, None] >> (2 * tl.arange(0, 4))[None, None, :]) & 3
    codes = tl.reshape(codes, (BLOCK_C, BLOCK_R))
    scale = tl.load(factor)
    times = tl.where(scale > 0, 1.0, tl.where(scale < 0, -1.0, 0.0))
    move = tl.where(codes == 1, 1.0, tl.where(codes == 2, -1.0, 0.0)) * length * times
    moves = tl.load(skip) == 0
    if TRANSPOSED:
        at = weights + c0.to(tl.int64) * rows + r0 + c[:, None] * rows + r[None, :]
        there, change = c_ok[:, None] & r_ok[None, :], comes[:, None] & moves
    else:
        at = weights + r0.to(tl.int64) * columns + c0 + r[:, None] * columns + c[None, :]
        there, change, move = r_ok[:, None] & c_ok[None, :], comes[None, :] & moves, tl.trans(move)
    raw = tl.load(at, mask=there, other=0)
    new = raw_of(values(raw, ELEMENT) - move, ELEMENT)
    if EVEN:
        tl.store(at, tl.where(change, new, raw), mask=there)
    else:
        tl.store(at, new, mask=there & change)


@triton.jit(do_not_specialize=["last", "tiles", "records", "wide", "powers", "updated", "rates", "roots"])
def count_kept(
    last: tl.int64, tiles, records, wide, powers, updated, rates, roots, RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What follows from the counts of kept columns: with this update, and the rule's scalars, rounded once from fp64.

    records: see `update_kept`. wide: [groups, 8] fp64: lr, lr_decay, line of `powers`, whether an update counts.
    powers: [lines, last + 1, 2] fp64: of each count 1 - beta1^count and 1 / sqrt(1 - beta2^count); what is beyond the
    last is as the last.
    """
    program = tl.program_id(0)
    record = records + tl.load(tiles + 2 * program) * 16
    i = tl.load(tiles + 2 * program + 1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < tl.load(record + 2)
    at = tl.load(record + 8) + i
    of_group = wide + tl.load(record + 9) * 8
    counts = tl.load(record + 6).to(tl.pointer_type(tl.int32))
    count = tl.load(counts + i, mask=ok, other=0) + tl.load(of_group + 3).to(tl.int32)
    tl.store(updated + at, count, mask=ok)
    if RULE == "adam":
        entry = tl.load(of_group + 2).to(tl.int64) * (last + 1) + tl.minimum(count.to(tl.int64), last)
        tl.store(rates + at, (tl.load(of_group) / tl.load(powers + 2 * entry)).to(tl.float32), mask=ok)
        tl.store(roots + at, tl.load(powers + 2 * entry + 1).to(tl.float32), mask=ok)
    elif RULE == "adagrad":
        slower = (count - 1).to(tl.float64) * tl.load(of_group + 1) + 1.0
        tl.store(rates + at, (tl.load(of_group) / slower).to(tl.float32), mask=ok)


@triton.jit
def load_run(address, inside, ok, ELEMENT: tl.constexpr, EVEN: tl.constexpr):
    """A tile of columns that lie behind each other, as fp32."""
    return values(tl.load(elements(address, ELEMENT, EVEN) + inside, mask=ok, other=0), ELEMENT)


@triton.jit
def store_run(address, inside, ok, tile, EVEN: tl.constexpr):
    """Write a tile of fp32 state; as integers, since a pointer that nothing was made of takes no hint."""
    tl.store(elements(address, "fp32", EVEN) + inside, tile.to(tl.int32, bitcast=True), mask=ok)


@triton.jit
def kept_step(
    w, m, v, g, rate, inverse_root, count, numbers, RULE: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    """The new weights and moments; `numbers` are those of the group, see `update_kept`."""
    lr, decay, weight_decay, eps = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    mix1, mix2, keep = tl.load(numbers + 4), tl.load(numbers + 5), tl.load(numbers + 6)
    flags = tl.load(numbers + 7).to(tl.int32)
    if L2:  # not with 0: infinite weights have no product with it
        g = tl.where(flags % 2 == 1, g + w * weight_decay, g)
    w = w * decay
    if RULE == "adam":
        w, m, v = adam_step(w, m, v, g, rate, inverse_root, mix1, keep, mix2, eps)
    elif RULE == "adagrad":
        w, m = adagrad_step(w, m, g, rate, eps)
    elif RULE == "lion":
        w, m = lion_step(w, m, g, lr, mix1, mix2)
    else:  # SGD; the momentum begins with the whole gradient
        nesterov, momentum = flags // 2 % 2 == 1, flags // 4 == 1
        m = tl.where(momentum, tl.where(count == 1, g, m * keep + g * mix1), m)
        w = w - tl.where(momentum, tl.where(nesterov, g + m * keep, m), g) * lr
    return w, m, v


@triton.jit(do_not_specialize=["tiles", "records", "reached", "narrow", "updated", "rates", "roots", "factor", "skip"])
def update_kept(
    tiles, records, reached, narrow, updated, rates, roots, factor, skip,
    RULE: tl.constexpr, L2: tl.constexpr, ELEMENT: tl.constexpr, EVEN: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One update of the kept columns of all weights: each number of their state is read and written once.

    records: [parts, 16] int64: rows, columns of the weight, kept columns, addresses of master, first and second moment
    and counts, address of the column numbers (0: they are 0, 1, ..), first of `updated`, number of the group.
    reached: [parts, 2] int64: addresses of the weight (0: it is not written) and of the gradient [kept columns, rows].
    narrow: [groups, 16] fp32, of which the last eight are lr, decay, weight_decay, eps, mix1, mix2, keep, and flags: 1
    L2, 2 Nesterov, 4 momentum.
    """
    program = tl.program_id(0)
    which = tl.load(tiles + 2 * program)
    at = tl.load(tiles + 2 * program + 1)
    record = records + which * 16
    rows = field(record, 0, EVEN).to(tl.int32)
    columns, n = tl.load(record + 1), tl.load(record + 2).to(tl.int32)
    blocks = tl.maximum((rows + BLOCK_R - 1) // BLOCK_R, 1)
    i0 = (at // blocks) * BLOCK_N
    i = tl.arange(0, BLOCK_N)
    r = (at % blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    i_ok, r_ok = i < n - i0, r < rows
    index = tl.load(record + 8) + i0 + i
    numbers_at = tl.load(record + 7)
    column = (i0 + i).to(tl.int64)
    if numbers_at != 0:
        column = tl.load(numbers_at.to(tl.pointer_type(tl.int64)) + i0 + i, mask=i_ok, other=0)
    ok = i_ok[:, None] & r_ok[None, :]
    inside = (i0.to(tl.int64) * rows) + i[:, None] * rows + r[None, :]
    count = tl.load(updated + index, mask=i_ok, other=0)
    rate = tl.load(rates + index, mask=i_ok, other=0.0)[:, None]
    inverse_root = tl.load(roots + index, mask=i_ok, other=0.0)[:, None]
    g = load_run(tl.load(reached + 2 * which + 1), inside, ok, ELEMENT, EVEN) * tl.load(factor)
    master, first, second = tl.load(record + 3), tl.load(record + 4), tl.load(record + 5)
    w, m = load_run(master, inside, ok, "fp32", EVEN), load_run(first, inside, ok, "fp32", EVEN)
    v = m
    if RULE == "adam":
        v = load_run(second, inside, ok, "fp32", EVEN)
    numbers = narrow + tl.load(record + 9) * 16 + 8
    new_w, new_m, new_v = kept_step(w, m, v, g, rate, inverse_root, count[:, None], numbers, RULE, L2)
    skips = tl.load(skip) != 0
    new_w, new_m = tl.where(skips, w, new_w), tl.where(skips, m, new_m)
    store_run(master, inside, ok, new_w, EVEN)
    store_run(first, inside, ok, new_m, EVEN)
    if RULE == "adam":
        store_run(second, inside, ok, tl.where(skips, v, new_v), EVEN)
    # Others with these columns read only `updated`.
    counts = tl.load(record + 6).to(tl.pointer_type(tl.int32))
    tl.store(counts + i0 + i, count, mask=i_ok & (at % blocks == 0) & (skips == 0))
    address = tl.load(reached + 2 * which)
    if address != 0:
        weights = elements(address, ELEMENT, EVEN and TRANSPOSED)
        raw = raw_of(new_w, ELEMENT)
        if TRANSPOSED:
            tl.store(weights + (column * rows)[:, None] + r[None, :], raw, mask=ok)
        else:
            to = weights + (r.to(tl.int64) * columns)[:, None] + column[None, :]
            tl.store(to, tl.trans(raw), mask=r_ok[:, None] & i_ok[None, :])
