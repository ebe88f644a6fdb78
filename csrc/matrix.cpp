// Packed memory has a column in one piece, a matrix most often a row. Work is cut into tiles of a few columns and many
// rows, so that a line of the matrix that was fetched for one column serves its neighbours too; a tile is transposed in
// memory that stays in a core's cache, and its columns are then updated as one run each. Columns that lie close
// together are transposed with all that is between them, a vector at a time. So columns are worked through in
// ascending order, wherever packed memory has them.

#include "matrix.hpp"

#include "energies.hpp"

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

constexpr std::size_t kGrain = 1 << 14;    // elements that are worth waking a thread for
constexpr std::size_t kSpan = 48;          // columns from a tile's first to its last that are close together
constexpr std::size_t kMostColumns = 128;  // of a tile

// Of a tile that is transposed.
struct Shape {
    std::size_t columns, rows;
    std::size_t pitch;  // elements from column to column: not all of them in the same sets of a cache
};
constexpr Shape kDense{32, 256, 256 + 16};           // a cache line of the narrower elements
constexpr Shape kSparse{kMostColumns, 64, 64 + 16};  // of a line little is wanted: many are fetched at once
constexpr std::size_t kScratch = std::max(kSpan * kDense.pitch, kMostColumns* kSparse.pitch);

std::size_t ceil_divide(std::size_t number, std::size_t divisor) {
    return (number + divisor - 1) / divisor;
}

std::size_t useful_threads(std::size_t threads, std::size_t elements) {
    return std::min(threads, ceil_divide(elements, kGrain));
}

// Which columns of a matrix belong to packed memory's rows, from the lowest on.
class Order {
public:
    // Where a column comes twice, in the order of packed memory's rows.
    Order(Index columns, std::size_t n) : columns_(columns), n_(n) {
        ascends_ =
            columns == nullptr || std::adjacent_find(columns, columns + n, std::greater_equal<>()) == columns + n;
        if (!ascends_) sort();
    }
    Order(Order&&) = default;  // what columns_ points to stays where it is

    bool ascends() const { return ascends_; }
    std::size_t column(std::size_t i) const { return columns_ == nullptr ? i : static_cast<std::size_t>(columns_[i]); }
    // Of packed memory.
    std::size_t row(std::size_t i) const { return rows_.empty() ? i : static_cast<std::size_t>(rows_[i]); }
    // Columns of the matrix from the first to the last; only where they ascend.
    std::size_t span(std::size_t begin, std::size_t end) const { return column(end - 1) - column(begin) + 1; }
    bool sparse() const { return ascends_ && n_ > 0 && span(0, n_) > n_ + n_ / 2; }

private:
    void sort();

    Index columns_;
    std::size_t n_;
    bool ascends_;
    std::vector<std::int64_t> sorted_;
    std::vector<std::int32_t> rows_;
};

// By counting: a comparison a column would cost as much as its transposition.
void Order::sort() {
    const auto [lowest, highest] = std::minmax_element(columns_, columns_ + n_);
    const std::int64_t first = *lowest, past = *highest - first + 1;
    if (n_ > std::numeric_limits<std::int32_t>::max()) return;
    std::vector<std::int32_t> row_of(static_cast<std::size_t>(past), -1);
    for (std::size_t i = 0; i < n_; ++i) {
        std::int32_t& row = row_of[static_cast<std::size_t>(columns_[i] - first)];
        if (row >= 0) return;
        row = static_cast<std::int32_t>(i);
    }
    sorted_.reserve(n_);
    rows_.reserve(n_);
    for (std::int64_t at = 0; at < past; ++at) {
        const std::int32_t row = row_of[static_cast<std::size_t>(at)];
        if (row < 0) continue;
        sorted_.push_back(first + at);
        rows_.push_back(row);
    }
    columns_ = sorted_.data();
    ascends_ = true;
}

// Of an order's columns [first, first + columns), and of each the rows [begin, begin + rows).
struct Tile {
    std::size_t first, columns;
    std::size_t begin, rows;
    std::size_t pitch;  // of a scratch
};

// [n, rows], cut into tiles: blocks of columns after one another, then the next block of rows.
class Tiles {
public:
    // `along`: the matrix too has each column in one piece.
    Tiles(std::size_t n, std::size_t rows, bool along, bool sparse)
        : n_(n),
          rows_(rows),
          shape_(along ? in_pieces(rows) : (sparse ? kSparse : kDense)),
          across_(ceil_divide(n, shape_.columns)) {}

    std::size_t count() const { return across_ * ceil_divide(rows_, shape_.rows); }
    Tile operator[](std::size_t i) const {
        const std::size_t first = i % across_ * shape_.columns, begin = i / across_ * shape_.rows;
        return {first, std::min(shape_.columns, n_ - first), begin, std::min(shape_.rows, rows_ - begin), shape_.pitch};
    }

private:
    static Shape in_pieces(std::size_t rows) {
        return {std::max<std::size_t>(1, kGrain / std::max<std::size_t>(1, rows)), kGrain, 0};
    }

    std::size_t n_, rows_;
    Shape shape_;
    std::size_t across_;
};

// A tile, transposed: a column in each place, elements of at most 4 bytes.
struct Scratch {
    alignas(64) std::byte data[kScratch * 4];
    std::byte* column(const Tile& tile, std::size_t place, std::size_t width) {
        return data + place * tile.pitch * width;
    }
};

// Where a scratch has each of a tile's columns.
using Places = std::array<std::size_t, kMostColumns>;

// Columns of the matrix from a tile's first to its last; beyond all bounds where it cannot be read in vectors.
std::size_t span_of(const Matrix& matrix, const Order& order, const Tile& tile) {
    if (matrix.column_stride != 1 || !order.ascends()) return std::numeric_limits<std::size_t>::max();
    return order.span(tile.first, tile.first + tile.columns);
}

void find_places(const Order& order, const Tile& tile, bool between, Places& places) {
    for (std::size_t c = 0; c < tile.columns; ++c) {
        places[c] = between ? order.column(tile.first + c) - order.column(tile.first) : c;
    }
}

std::byte* element(const Matrix& matrix, std::size_t width, std::size_t row, std::size_t column) {
    const std::int64_t at =
        static_cast<std::int64_t>(row) * matrix.row_stride + static_cast<std::int64_t>(column) * matrix.column_stride;
    return matrix.data + at * static_cast<std::int64_t>(width);
}

// Calls move(element of the matrix, element of the scratch) for all of a tile.
template <class Word, class Move>
void each_element(const Matrix& matrix, const Order& order, const Tile& tile, Scratch& scratch, Move move) {
    std::int64_t offsets[kMostColumns];
    for (std::size_t c = 0; c < tile.columns; ++c) {
        offsets[c] = static_cast<std::int64_t>(order.column(tile.first + c)) * matrix.column_stride;
    }
    Word* const packed = reinterpret_cast<Word*>(scratch.data);
    for (std::size_t r = 0; r < tile.rows; ++r) {
        Word* const row = reinterpret_cast<Word*>(element(matrix, sizeof(Word), tile.begin + r, 0));
        for (std::size_t c = 0; c < tile.columns; ++c) move(row[offsets[c]], packed[c * tile.pitch + r]);
    }
}

// Reads a tile; where its columns lie close together, in vectors, and then with those between them.
template <class Word>
void gather(const Matrix& matrix, const Order& order, const Tile& tile, Scratch& scratch, Places& places) {
    const std::size_t span = span_of(matrix, order, tile);
    find_places(order, tile, span <= kSpan, places);
    if (span > kSpan) {
        each_element<Word>(matrix, order, tile, scratch, [](const auto& from, auto& to) { to = from; });
        return;
    }
    const auto* from =
        reinterpret_cast<const Word*>(element(matrix, sizeof(Word), tile.begin, order.column(tile.first)));
    transpose<Along::from>(from, matrix.row_stride, reinterpret_cast<Word*>(scratch.data),
                           static_cast<std::int64_t>(tile.pitch), tile.rows, span);
}

// Writes a tile, and, if the scratch has them, the columns between its own.
template <class Word>
void scatter(const Matrix& matrix, const Order& order, const Tile& tile, Scratch& scratch, bool between) {
    const std::size_t span = span_of(matrix, order, tile);
    if (!between && span != tile.columns) {
        each_element<Word>(matrix, order, tile, scratch, [](auto& to, const auto& from) { to = from; });
        return;
    }
    auto* to = reinterpret_cast<Word*>(element(matrix, sizeof(Word), tile.begin, order.column(tile.first)));
    transpose<Along::to>(reinterpret_cast<const Word*>(scratch.data), static_cast<std::int64_t>(tile.pitch), to,
                         matrix.row_stride, span, tile.rows);
}

void gather(const Matrix& matrix, std::size_t width, const Order& order, const Tile& tile, Scratch& scratch,
            Places& places) {
    width == 4 ? gather<std::uint32_t>(matrix, order, tile, scratch, places)
               : gather<std::uint16_t>(matrix, order, tile, scratch, places);
}

void scatter(const Matrix& matrix, std::size_t width, const Order& order, const Tile& tile, Scratch& scratch,
             bool between = false) {
    width == 4 ? scatter<std::uint32_t>(matrix, order, tile, scratch, between)
               : scatter<std::uint16_t>(matrix, order, tile, scratch, between);
}

// One update, and how it is cut.
class Plan {
public:
    Plan(const ColumnUpdate& update, std::size_t first_tile)
        : update_(update),
          order_(update.columns, update.state.columns),
          flat_(is_flat()),
          direct_((update.packed || in_pieces(update.gradient)) && in_pieces(update.weights)),
          tiles_(flat_ ? 1 : update.state.columns, flat_ ? elements() : update.state.rows, direct_, order_.sparse()),
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
        if (state.columns < 2 || update_.packed) return false;
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
    Order order_;
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
    const auto& [state, gradient, weights, columns, factor, hyper, skip, packed] = update_;
    const std::size_t entries = skip ? 0 : 1;
    const std::size_t width = element_bytes(gradient.dtype), weight_width = element_bytes(weights.dtype);
    Scratch gradients, results;
    Places places;
    if (!direct_ && !skip && !packed) gather(gradient, width, order_, tile, gradients, places);

    std::int64_t known_count = -1;
    Constants constants{};
    for (std::size_t c = 0; c < tile.columns; ++c) {
        const std::size_t i = order_.row(tile.first + c), column = order_.column(tile.first + c);
        Run run = run_of(i, tile);
        if (weights.data != nullptr) {
            run.result =
                direct_ ? element(weights, weight_width, tile.begin, column) : results.column(tile, c, weight_width);
        }
        if (state.count[i] != known_count) {
            known_count = state.count[i];
            constants = this->constants(state.count[i]);
        }
        const std::byte* const from = packed    ? gradient.data + (i * state.rows + tile.begin) * width
                                      : direct_ ? element(gradient, width, tile.begin, column)
                                                : gradients.column(tile, places[c], width);
        const Gradient entry{from, gradient.dtype, factor};
        replay(state.rule, run, {&entry, entries}, {&constants, entries});
    }
    if (!direct_ && weights.data != nullptr) scatter(weights, weight_width, order_, tile, results);
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
    const Order order(columns, n);
    const Tiles tiles(n, rows, along, order.sparse());
    Team::of_process().run(useful_threads(threads, n * rows), tiles.count(), [&](std::size_t number) {
        const Tile tile = tiles[number];
        Scratch scratch;
        Places places;
        if (!along) gather(matrix, width, order, tile, scratch, places);
        for (std::size_t c = 0; c < tile.columns; ++c) {
            const std::size_t i = tile.first + c;
            const std::byte* column =
                along ? element(matrix, width, tile.begin, order.column(i)) : scratch.column(tile, places[c], width);
            std::memcpy(packed + (order.row(i) * rows + tile.begin) * width, column, tile.rows * width);
        }
    });
}

void scatter_columns(const Matrix& matrix, Index columns, std::size_t n, std::size_t rows, const std::byte* source,
                     Dtype source_dtype, std::size_t threads) {
    const bool along = matrix.row_stride == 1;
    const std::size_t width = element_bytes(matrix.dtype), source_width = element_bytes(source_dtype);
    const Order order(columns, n);
    const Tiles tiles(n, rows, along, order.sparse());
    Team::of_process().run(useful_threads(threads, n * rows), tiles.count(), [&](std::size_t number) {
        const Tile tile = tiles[number];
        // No two tiles' spans overlap, so what lies between the columns can be written back as it was.
        const std::size_t span = along ? 0 : span_of(matrix, order, tile);
        const bool between = span > tile.columns && span <= kSpan;
        Scratch scratch;
        Places places;
        if (between) {
            gather(matrix, width, order, tile, scratch, places);
        } else if (!along) {
            find_places(order, tile, false, places);
        }
        for (std::size_t c = 0; c < tile.columns; ++c) {
            const std::size_t i = tile.first + c;
            const std::byte* from = source + (order.row(i) * rows + tile.begin) * source_width;
            std::byte* to =
                along ? element(matrix, width, tile.begin, order.column(i)) : scratch.column(tile, places[c], width);
            if (source_dtype == matrix.dtype) {
                std::memcpy(to, from, tile.rows * width);
            } else {
                narrow(reinterpret_cast<const float*>(from), to, matrix.dtype, tile.rows);
            }
        }
        if (!along) scatter(matrix, width, order, tile, scratch, between);
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

void pack_bucket(const Bucket& bucket, std::span<std::byte* const> matrices, std::byte* sent, std::byte* kept,
                 float* energies, std::size_t threads) {
    const std::size_t width = element_bytes(bucket.dtype);
    for (std::size_t number = 0; number < bucket.parts.size(); ++number) {
        const BucketPart& part = bucket.parts[number];
        if (matrices[number] != nullptr) {
            const Matrix matrix = bucket.matrix(part, matrices[number]);
            column_energies(matrix, part.rows, part.columns, energies, threads);
            pack_columns(matrix, width, part.sent.data(), part.sent.size(), part.rows, sent + part.sent_start * width,
                         threads);
            pack_columns(matrix, width, part.kept.data(), part.kept.size(), part.rows, kept + part.kept_start * width,
                         threads);
        }
        energies += part.columns;
    }
}

void show_bucket(const Bucket& bucket, std::span<std::byte* const> matrices, const std::byte* sent,
                 std::size_t threads) {
    const std::size_t width = element_bytes(bucket.dtype);
    for (std::size_t number = 0; number < bucket.parts.size(); ++number) {
        const BucketPart& part = bucket.parts[number];
        if (matrices[number] == nullptr) continue;
        scatter_columns(bucket.matrix(part, matrices[number]), part.sent.data(), part.sent.size(), part.rows,
                        sent + part.sent_start * width, bucket.dtype, threads);
    }
}

}  // namespace zenflow
