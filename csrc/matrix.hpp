// Columns of a weight in the model's own memory, where that is the host's: copied out, written, updated in place. Each
// function returns when all is done, on at most `threads` threads, and gives the same bits on any number of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernel.hpp"
#include "tasks.hpp"

namespace zenflow {

// [rows, columns] in any strides, which count elements. Null: there is none.
struct Matrix {
    std::byte* data;
    Dtype dtype;
    std::int64_t row_stride;
    std::int64_t column_stride;
};

// Which column of a matrix belongs to each of n rows of packed memory; null: column i to row i.
using Index = const std::int64_t*;

// State of n columns and what one update needs; the ranges do not overlap, unless it is the same column twice.
struct ColumnUpdate {
    Columns state;
    Matrix gradient;
    Matrix weights;  // are written from the masters, rounded
    Index columns;   // of both matrices; of the weights alone where the gradient is packed
    float factor;    // on the gradient
    Hyper hyper;
    bool skip;            // the state stays as it is
    bool packed = false;  // the gradient is [n, rows] in one piece
};

// One update each. A master and its count are written, then its weight; the counts change last.
void update_columns(std::span<const ColumnUpdate> updates, std::size_t threads);

// packed[i, r] = matrix[r, columns[i]], whose elements have `width` bytes (2 or 4), bit for bit.
void pack_columns(const Matrix& matrix, std::size_t width, Index columns, std::size_t n, std::size_t rows,
                  std::byte* packed, std::size_t threads);

// matrix[r, columns[i]] = source[i, r]: in the matrix' dtype bit for bit, else from fp32, rounded to nearest even.
void scatter_columns(const Matrix& matrix, Index columns, std::size_t n, std::size_t rows, const std::byte* source,
                     Dtype source_dtype, std::size_t threads);

// One weight's matrix in a bucket: which of its columns go where in two flat buffers, one column behind the other.
struct BucketPart {
    std::size_t rows;
    std::size_t columns;
    std::vector<std::int64_t> sent;
    std::vector<std::int64_t> kept;
    std::size_t sent_start;  // of both, in elements
    std::size_t kept_start;
};

// The weights of a bucket in one dtype; each matrix is contiguous, or its transpose is.
struct Bucket {
    Dtype dtype;
    bool transposed;
    std::vector<BucketPart> parts;

    Matrix matrix(const BucketPart& part, std::byte* data) const {
        const auto rows = static_cast<std::int64_t>(part.rows);
        const auto columns = static_cast<std::int64_t>(part.columns);
        return transposed ? Matrix{data, dtype, 1, rows} : Matrix{data, dtype, columns, 1};
    }
};

// Packs each part's matrix (null: it is passed over) into both buffers; energies: of all parts' columns, in turn.
void pack_bucket(const Bucket& bucket, std::span<std::byte* const> matrices, std::byte* sent, std::byte* kept,
                 float* energies, std::size_t threads);

// Writes what was sent, in the bucket's dtype, into each part's matrix (null: it is passed over).
void show_bucket(const Bucket& bucket, std::span<std::byte* const> matrices, const std::byte* sent,
                 std::size_t threads);

// Throws std::out_of_range where a column is not one of a matrix with `limit` columns.
void check_columns(Index columns, std::size_t n, std::size_t limit);

}  // namespace zenflow
