// Squared norms of the columns of a matrix in the host's own memory.
#pragma once

#include <cstddef>

#include "matrix.hpp"

namespace zenflow {

// Rows whose squares are summed before they join the others. A part of the definition: the eager twin and the reference
// sum alike, so that all of them select the same columns.
constexpr std::size_t kEnergyRows = 64;

// energies[c] = the sum of matrix[r, c]^2 in fp32: in blocks of kEnergyRows rows, each from its first row to its last,
// and then the blocks' sums from first to last. The same bits on any number of threads and in any strides.
void column_energies(const Matrix& matrix, std::size_t rows, std::size_t columns, float* energies, std::size_t threads);

}  // namespace zenflow
