// Rows are added as a whole, so memory is read in its own order and every column has its own sum: nothing is reduced
// across a vector. A matrix that has its columns in one piece is transposed first, a block in a core's cache at a time.

#include "energies.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "clones.hpp"
#include "convert.hpp"
#include "team.hpp"
#include "transpose.hpp"

namespace zenflow {
namespace {

constexpr std::size_t kStripe = 1024;     // columns whose sums stay in a core's first cache
constexpr std::size_t kTileColumns = 64;  // transposed at a time
constexpr std::size_t kGrain = 1 << 15;   // elements that are worth waking a thread for

template <class Format>
[[gnu::always_inline]] inline void add_row(const void* stored, float* sums, std::size_t n) {
    const auto* row = static_cast<const std::byte*>(stored);
    for (std::size_t i = 0; i < n; ++i) {
        typename Format::Stored element;
        std::memcpy(&element, row + i * sizeof element, sizeof element);  // fp32 may lie in words
        const float value = Format::widen(element);
        sums[i] += value * value;
    }
}

ZENFLOW_CLONES void add_fp32(const void* row, float* sums, std::size_t n) {
    add_row<Fp32>(row, sums, n);
}
ZENFLOW_CLONES void add_bf16(const void* row, float* sums, std::size_t n) {
    add_row<Bf16>(row, sums, n);
}
ZENFLOW_CLONES void add_fp16(const void* row, float* sums, std::size_t n) {
    add_row<Fp16>(row, sums, n);
}

ZENFLOW_CLONES void add_sums(const float* more, float* sums, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) sums[i] += more[i];
}

void add_squares(Dtype dtype, const void* row, float* sums, std::size_t n) {
    switch (dtype) {
        case Dtype::fp32:
            return add_fp32(row, sums, n);
        case Dtype::bf16:
            return add_bf16(row, sums, n);
        case Dtype::fp16:
            return add_fp16(row, sums, n);
    }
}

struct Block {
    std::size_t row, rows;
    std::size_t column, columns;
};

// A tile in rows, whatever the matrix' strides.
template <class Word>
void lay_out(const Matrix& matrix, const Block& tile, Word* rows) {
    const auto* from = reinterpret_cast<const Word*>(matrix.data) +
                       static_cast<std::int64_t>(tile.row) * matrix.row_stride +
                       static_cast<std::int64_t>(tile.column) * matrix.column_stride;
    if (matrix.row_stride == 1) {
        transpose<Along::from>(from, matrix.column_stride, rows, std::int64_t{kTileColumns}, tile.columns, tile.rows);
        return;
    }
    for (std::size_t r = 0; r < tile.rows; ++r) {
        const Word* row = from + static_cast<std::int64_t>(r) * matrix.row_stride;
        for (std::size_t c = 0; c < tile.columns; ++c) {
            rows[r * kTileColumns + c] = row[static_cast<std::int64_t>(c) * matrix.column_stride];
        }
    }
}

template <class Word>
void add_part(const Matrix& matrix, const Block& part, float* sums) {
    if (matrix.column_stride == 1) {
        const auto* row = reinterpret_cast<const Word*>(matrix.data) +
                          static_cast<std::int64_t>(part.row) * matrix.row_stride +
                          static_cast<std::int64_t>(part.column);
        for (std::size_t r = 0; r < part.rows; ++r, row += matrix.row_stride) {
            add_squares(matrix.dtype, row, sums, part.columns);
        }
        return;
    }
    alignas(64) Word rows[kEnergyRows * kTileColumns];
    for (std::size_t c = 0; c < part.columns; c += kTileColumns) {
        const Block tile{part.row, part.rows, part.column + c, std::min(kTileColumns, part.columns - c)};
        lay_out(matrix, tile, rows);
        for (std::size_t r = 0; r < tile.rows; ++r) {
            add_squares(matrix.dtype, rows + r * kTileColumns, sums + c, tile.columns);
        }
    }
}

std::size_t ceil_divide(std::size_t number, std::size_t divisor) {
    return (number + divisor - 1) / divisor;
}

}  // namespace

void column_energies(const Matrix& matrix, std::size_t rows, std::size_t columns, float* energies,
                     std::size_t threads) {
    std::fill_n(energies, columns, 0.0f);
    const std::size_t blocks = ceil_divide(rows, kEnergyRows), stripes = ceil_divide(columns, kStripe);
    if (blocks == 0 || columns == 0) return;
    // The first block's sums are those that the others are added to.
    const auto others = std::make_unique_for_overwrite<float[]>((blocks - 1) * columns);
    const auto sums_of = [&](std::size_t block) { return block == 0 ? energies : &others[(block - 1) * columns]; };
    const auto sum_piece = [&](std::size_t piece) {
        const std::size_t block = piece / stripes, row = block * kEnergyRows, column = piece % stripes * kStripe;
        float* const sums = sums_of(block) + column;
        const Block part{row, std::min(kEnergyRows, rows - row), column, std::min(kStripe, columns - column)};
        std::fill_n(sums, part.columns, 0.0f);
        if (element_bytes(matrix.dtype) == 4) {
            add_part<std::uint32_t>(matrix, part, sums);
        } else {
            add_part<std::uint16_t>(matrix, part, sums);
        }
    };
    Team::of_process().run(std::min(threads, ceil_divide(rows * columns, kGrain)), blocks * stripes, sum_piece);
    Team::of_process().run(std::min(threads, ceil_divide(blocks * columns, kGrain)), stripes, [&](std::size_t stripe) {
        const std::size_t column = stripe * kStripe, n = std::min(kStripe, columns - column);
        for (std::size_t block = 1; block < blocks; ++block) add_sums(sums_of(block) + column, energies + column, n);
    });
}

}  // namespace zenflow
