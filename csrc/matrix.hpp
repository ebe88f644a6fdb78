// Columns of a weight in the model's own memory, where that is the host's: copied out, written, updated in place. Each
// function returns when all is done, on at most `threads` threads, and gives the same bits on any number of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

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
    Index columns;   // of both matrices
    float factor;    // on the gradient
    Hyper hyper;
    bool skip;  // the state stays as it is
};

// One update each. A master and its count are written, then its weight; the counts change last.
void update_columns(std::span<const ColumnUpdate> updates, std::size_t threads);

// packed[i, r] = matrix[r, columns[i]], whose elements have `width` bytes (2 or 4), bit for bit.
void pack_columns(const Matrix& matrix, std::size_t width, Index columns, std::size_t n, std::size_t rows,
                  std::byte* packed, std::size_t threads);

// matrix[r, columns[i]] = source[i, r]: in the matrix' dtype bit for bit, else from fp32, rounded to nearest even.
void scatter_columns(const Matrix& matrix, Index columns, std::size_t n, std::size_t rows, const std::byte* source,
                     Dtype source_dtype, std::size_t threads);

// Throws std::out_of_range where a column is not one of a matrix with `limit` columns.
void check_columns(Index columns, std::size_t n, std::size_t limit);

}  // namespace zenflow
