// Packed memory has a column in one piece, a matrix most often a row. Work is cut into tiles of a few columns and many
// rows, so that a line of the matrix that was fetched for one column serves its neighbours too; a tile is transposed in
// memory that stays in a core's cache, and its columns are then updated as one run each. Columns that lie close
// together are transposed with all that is between them, a vector at a time.

#include "matrix.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "team.hpp"
#include "transpose.hpp"

namespace zenflow {
namespace {

constexpr std::size_t kTileColumns = 32;        // a cache line of the narrower elements
constexpr std::size_t kSpan = 48;               // columns from a tile's first to its last that are close together
constexpr std::size_t kTileRows = 256;          // elements
constexpr std::size_t kPitch = kTileRows + 16;  // from column to column: not all of them in the same sets of a cache
constexpr std::size_t kGrain = 1 << 14;         // elements that are worth waking a thread for

std::size_t ceil_divide(std::size_t number, std::size_t divisor) {
    return (number + divisor - 1) / divisor;
}

std::size_t useful_threads(std::size_t threads, std::size_t elements) {
    return std::min(threads, ceil_divide(elements, kGrain));
}

std::size_t column_of(Index columns, std::size_t i) {
    return columns == nullptr ? i : static_cast<std::size_t>(columns[i]);
}

// Columns [first, first + columns) of packed memory, and of each the rows [begin, begin + rows).
struct Tile {
    std::size_t first, columns;
    std::size_t begin, rows;
};

// [n, rows], cut into tiles: blocks of columns after one another, then the next block of rows.
class Tiles {
public:
    // `along`: the matrix too has each column in one piece.
    Tiles(std::size_t n, std::size_t rows, bool along)
        : n_(n),
          rows_(rows),
          columns_(along ? std::max<std::size_t>(1, kGrain / std::max<std::size_t>(1, rows)) : kTileColumns),
          tile_rows_(along ? kGrain : kTileRows),
          across_(ceil_divide(n, columns_)) {}

    std::size_t count() const { return across_ * ceil_divide(rows_, tile_rows_); }
    Tile operator[](std::size_t i) const {
        const std::size_t first = i % across_ * columns_, begin = i / across_ * tile_rows_;
        return {first, std::min(columns_, n_ - first), begin, std::min(tile_rows_, rows_ - begin)};
    }

private:
    std::size_t n_, rows_, columns_, tile_rows_, across_;
};

// A tile, transposed: a column in each place, elements of at most 4 bytes.
struct Scratch {
    alignas(64) std::byte data[kSpan * kPitch * 4];
    std::byte* column(std::size_t place, std::size_t width) { return data + place * kPitch * width; }
};

// Where a scratch has each of a tile's columns.
using Places = std::array<std::size_t, kTileColumns>;

bool ascend(Index columns, std::size_t begin, std::size_t end) {
    return columns == nullptr ||
           std::adjacent_find(columns + begin, columns + end, std::greater_equal<>()) == columns + end;
}

// Columns of the matrix from a tile's first to its last; beyond all bounds where it cannot be read in vectors.
std::size_t span_of(const Matrix& matrix, Index columns, const Tile& tile) {
    const std::size_t end = tile.first + tile.columns;
    if (matrix.column_stride != 1 || !ascend(columns, tile.first, end)) return std::numeric_limits<std::size_t>::max();
    return column_of(columns, end - 1) - column_of(columns, tile.first) + 1;
}

Places places_of(Index columns, const Tile& tile, bool between) {
    Places places{};
    for (std::size_t c = 0; c < tile.columns; ++c) {
        places[c] = between ? column_of(columns, tile.first + c) - column_of(columns, tile.first) : c;
    }
    return places;
}

std::byte* element(const Matrix& matrix, std::size_t width, std::size_t row, std::size_t column) {
    const std::int64_t at =
        static_cast<std::int64_t>(row) * matrix.row_stride + static_cast<std::int64_t>(column) * matrix.column_stride;
    return matrix.data + at * static_cast<std::int64_t>(width);
}

// Calls move(element of the matrix, element of the scratch) for all of a tile.
template <class Word, class Move>
void each_element(const Matrix& matrix, Index columns, const Tile& tile, Scratch& scratch, Move move) {
    std::int64_t offsets[kTileColumns];
    for (std::size_t c = 0; c < tile.columns; ++c) {
        offsets[c] = static_cast<std::int64_t>(column_of(columns, tile.first + c)) * matrix.column_stride;
    }
    Word* const packed = reinterpret_cast<Word*>(scratch.data);
    for (std::size_t r = 0; r < tile.rows; ++r) {
        Word* const row = reinterpret_cast<Word*>(element(matrix, sizeof(Word), tile.begin + r, 0));
        for (std::size_t c = 0; c < tile.columns; ++c) move(row[offsets[c]], packed[c * kPitch + r]);
    }
}

// Reads a tile; where its columns lie close together, in vectors, and then with those between them.
template <class Word>
Places gather(const Matrix& matrix, Index columns, const Tile& tile, Scratch& scratch) {
    const std::size_t span = span_of(matrix, columns, tile);
    if (span > kSpan) {
        each_element<Word>(matrix, columns, tile, scratch, [](const auto& from, auto& to) { to = from; });
        return places_of(columns, tile, false);
    }
    const auto* from =
        reinterpret_cast<const Word*>(element(matrix, sizeof(Word), tile.begin, column_of(columns, tile.first)));
    transpose<Along::from>(from, matrix.row_stride, reinterpret_cast<Word*>(scratch.data), std::int64_t{kPitch},
                           tile.rows, span);
    return places_of(columns, tile, true);
}

// Writes a tile, and, if the scratch has them, the columns between its own.
template <class Word>
void scatter(const Matrix& matrix, Index columns, const Tile& tile, Scratch& scratch, bool between) {
    const std::size_t span = span_of(matrix, columns, tile);
    if (!between && span != tile.columns) {
        each_element<Word>(matrix, columns, tile, scratch, [](auto& to, const auto& from) { to = from; });
        return;
    }
    auto* to = reinterpret_cast<Word*>(element(matrix, sizeof(Word), tile.begin, column_of(columns, tile.first)));
    transpose<Along::to>(reinterpret_cast<const Word*>(scratch.data), std::int64_t{kPitch}, to, matrix.row_stride, span,
                         tile.rows);
}

Places gather(const Matrix& matrix, std::size_t width, Index columns, const Tile& tile, Scratch& scratch) {
    return width == 4 ? gather<std::uint32_t>(matrix, columns, tile, scratch)
                      : gather<std::uint16_t>(matrix, columns, tile, scratch);
}

void scatter(const Matrix& matrix, std::size_t width, Index columns, const Tile& tile, Scratch& scratch,
             bool between = false) {
    width == 4 ? scatter<std::uint32_t>(matrix, columns, tile, scratch, between)
               : scatter<std::uint16_t>(matrix, columns, tile, scratch, between);
}

// One update, and how it is cut.
class Plan {
public:
    Plan(const ColumnUpdate& update, std::size_t first_tile)
        : update_(update),
          flat_(is_flat()),
          direct_(in_pieces(update.gradient) && in_pieces(update.weights)),
          tiles_(flat_ ? 1 : update.state.columns, flat_ ? elements() : update.state.rows, direct_),
          first_tile_(first_tile) {}

    std::size_t elements() const { return update_.state.columns * update_.state.rows; }
    std::size_t first_tile() const { return first_tile_; }
    std::size_t end_tile() const { return first_tile_ + tiles_.count(); }
    void run(std::size_t tile) const;
    void add_to_counts() const;

private:
    static bool in_pieces(const Matrix& matrix) { return matrix.data == nullptr || matrix.row_stride == 1; }
    bool behind_each_other(const Matrix& matrix) const {
        return matrix.data == nullptr ||
               (matrix.row_stride == 1 && matrix.column_stride == static_cast<std::int64_t>(update_.state.rows));
    }
    // Whether all of it is one run. A single column always is, wherever its neighbours would be.
    bool is_flat() const {
        const Columns& state = update_.state;
        if (state.columns < 2) return false;
        return update_.columns == nullptr && behind_each_other(update_.gradient) &&
               behind_each_other(update_.weights) &&
               std::all_of(state.count, state.count + state.columns,
                           [&](std::int32_t count) { return count == state.count[0]; });
    }
    bool counts() const { return !update_.skip && zenflow::counts(update_.state.rule, numbers()); }
    std::span<const double> numbers() const { return {update_.hyper.numbers.data(), numbers_of(update_.state.rule)}; }
    Constants constants(std::int32_t count) const {
        return constants_of(update_.state.rule, numbers(), update_.hyper.decay, std::int64_t{count} + counts());
    }
    Run run_of(std::size_t i, const Tile& tile) const;

    ColumnUpdate update_;
    bool flat_, direct_;
    Tiles tiles_;
    std::size_t first_tile_;
};

Run Plan::run_of(std::size_t i, const Tile& tile) const {
    const Columns& state = update_.state;
    const std::size_t at = i * state.rows + tile.begin;
    Run run{tile.rows, state.master + at, {}, nullptr, update_.weights.dtype};
    for (std::size_t m = 0; m < kMaxMoments; ++m) {
        run.moments[m] = state.moments[m] == nullptr ? nullptr : state.moments[m] + at;
    }
    return run;
}

void Plan::run(std::size_t number) const {
    const Tile tile = tiles_[number - first_tile_];
    const auto& [state, gradient, weights, columns, factor, hyper, skip] = update_;
    const std::size_t entries = skip ? 0 : 1;
    const std::size_t width = element_bytes(gradient.dtype), weight_width = element_bytes(weights.dtype);
    Scratch gradients, results;
    Places places{};
    if (!direct_ && !skip) places = gather(gradient, width, columns, tile, gradients);

    std::int64_t known_count = -1;
    Constants constants{};
    for (std::size_t c = 0; c < tile.columns; ++c) {
        const std::size_t i = tile.first + c, column = column_of(columns, i);
        Run run = run_of(i, tile);
        if (weights.data != nullptr) {
            run.result = direct_ ? element(weights, weight_width, tile.begin, column) : results.column(c, weight_width);
        }
        if (state.count[i] != known_count) {
            known_count = state.count[i];
            constants = this->constants(state.count[i]);
        }
        const Gradient entry{
            direct_ ? element(gradient, width, tile.begin, column) : gradients.column(places[c], width), gradient.dtype,
            factor};
        replay(state.rule, run, {&entry, entries}, {&constants, entries});
    }
    if (!direct_ && weights.data != nullptr) scatter(weights, weight_width, columns, tile, results);
}

void Plan::add_to_counts() const {
    if (!counts()) return;
    for (std::size_t i = 0; i < update_.state.columns; ++i) ++update_.state.count[i];
}

}  // namespace

void update_columns(std::span<const ColumnUpdate> updates, std::size_t threads) {
    std::vector<Plan> plans;
    plans.reserve(updates.size());
    std::size_t tiles = 0, elements = 0;
    for (const ColumnUpdate& update : updates) {
        plans.emplace_back(update, tiles);
        tiles = plans.back().end_tile();
        elements += plans.back().elements();
    }
    Team::of_process().run(useful_threads(threads, elements), tiles, [&](std::size_t tile) {
        const auto behind =
            std::upper_bound(plans.begin(), plans.end(), tile,
                             [](std::size_t number, const Plan& plan) { return number < plan.end_tile(); });
        behind->run(tile);
    });
    for (const Plan& plan : plans) plan.add_to_counts();
}

void pack_columns(const Matrix& matrix, std::size_t width, Index columns, std::size_t n, std::size_t rows,
                  std::byte* packed, std::size_t threads) {
    const bool along = matrix.row_stride == 1;
    const Tiles tiles(n, rows, along);
    Team::of_process().run(useful_threads(threads, n * rows), tiles.count(), [&](std::size_t number) {
        const Tile tile = tiles[number];
        Scratch scratch;
        Places places{};
        if (!along) places = gather(matrix, width, columns, tile, scratch);
        for (std::size_t c = 0; c < tile.columns; ++c) {
            const std::size_t i = tile.first + c;
            const std::byte* column =
                along ? element(matrix, width, tile.begin, column_of(columns, i)) : scratch.column(places[c], width);
            std::memcpy(packed + (i * rows + tile.begin) * width, column, tile.rows * width);
        }
    });
}

void scatter_columns(const Matrix& matrix, Index columns, std::size_t n, std::size_t rows, const std::byte* source,
                     Dtype source_dtype, std::size_t threads) {
    const bool along = matrix.row_stride == 1;
    const std::size_t width = element_bytes(matrix.dtype), source_width = element_bytes(source_dtype);
    const Tiles tiles(n, rows, along);
    // Then no two tiles' spans overlap, and what lies between the columns can be written back as it was.
    const bool disjoint = ascend(columns, 0, n);
    Team::of_process().run(useful_threads(threads, n * rows), tiles.count(), [&](std::size_t number) {
        const Tile tile = tiles[number];
        const std::size_t span = along ? 0 : span_of(matrix, columns, tile);
        const bool between = disjoint && span > tile.columns && span <= kSpan;
        Scratch scratch;
        Places places{};
        if (!along) {
            places = between ? gather(matrix, width, columns, tile, scratch) : places_of(columns, tile, false);
        }
        for (std::size_t c = 0; c < tile.columns; ++c) {
            const std::size_t i = tile.first + c;
            const std::byte* from = source + (i * rows + tile.begin) * source_width;
            std::byte* to =
                along ? element(matrix, width, tile.begin, column_of(columns, i)) : scratch.column(places[c], width);
            if (source_dtype == matrix.dtype) {
                std::memcpy(to, from, tile.rows * width);
            } else {
                narrow(reinterpret_cast<const float*>(from), to, matrix.dtype, tile.rows);
            }
        }
        if (!along) scatter(matrix, width, columns, tile, scratch, between);
    });
}

void check_columns(Index columns, std::size_t n, std::size_t limit) {
    for (std::size_t i = 0; i < n; ++i) {
        if (columns[i] < 0 || static_cast<std::size_t>(columns[i]) >= limit) {
            throw std::out_of_range("column " + std::to_string(columns[i]) + " of a matrix with " +
                                    std::to_string(limit));
        }
    }
}

}  // namespace zenflow
