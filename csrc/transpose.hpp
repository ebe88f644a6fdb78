// A block of a matrix, transposed: in squares of one vector's width, with scalar code for what is narrower than that.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace zenflow {

namespace transposing {

using Words2 = std::uint16_t __attribute__((vector_size(16)));
using Words4 = std::uint32_t __attribute__((vector_size(16)));

template <class Word>
struct Square;

template <>
struct Square<std::uint16_t> {
    static constexpr std::size_t kSide = 8;
    using Vector = Words2;
    // Pairs of rows, then pairs of those, then the halves: column c of the eight rows is vector c.
    [[gnu::always_inline]] static void turn(Vector (&v)[kSide]) {
        Vector pairs[kSide], fours[kSide];
        for (std::size_t i = 0; i < kSide; i += 2) {
            pairs[i] = __builtin_shufflevector(v[i], v[i + 1], 0, 8, 1, 9, 2, 10, 3, 11);
            pairs[i + 1] = __builtin_shufflevector(v[i], v[i + 1], 4, 12, 5, 13, 6, 14, 7, 15);
        }
        for (std::size_t i = 0; i < kSide; i += 4) {
            for (std::size_t j = 0; j < 2; ++j) {
                const Vector low = pairs[i + j], high = pairs[i + j + 2];
                fours[i + 2 * j] = __builtin_shufflevector(low, high, 0, 1, 8, 9, 2, 3, 10, 11);
                fours[i + 2 * j + 1] = __builtin_shufflevector(low, high, 4, 5, 12, 13, 6, 7, 14, 15);
            }
        }
        for (std::size_t i = 0; i < kSide / 2; ++i) {
            v[2 * i] = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
            v[2 * i + 1] = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        }
    }
};

template <>
struct Square<std::uint32_t> {
    static constexpr std::size_t kSide = 4;
    using Vector = Words4;
    [[gnu::always_inline]] static void turn(Vector (&v)[kSide]) {
        const Vector a = __builtin_shufflevector(v[0], v[1], 0, 4, 1, 5);
        const Vector b = __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7);
        const Vector c = __builtin_shufflevector(v[2], v[3], 0, 4, 1, 5);
        const Vector d = __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7);
        v[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
        v[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
        v[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
        v[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
    }
};

}  // namespace transposing

// Which of the two is gone through row by row, so that a cache line of it is done with before the next one. What lies
// behind its rows is fetched meanwhile: rows are too far from each other for the hardware to guess.
enum class Along { from, to };

// to[c * to_stride + r] = from[r * from_stride + c] for r < rows, c < columns; strides count words.
template <Along along, class Word>
void transpose(const Word* from, std::int64_t from_stride, Word* to, std::int64_t to_stride, std::size_t rows,
               std::size_t columns) {
    using Square = transposing::Square<Word>;
    constexpr std::size_t kSide = Square::kSide, kAhead = 64 / sizeof(Word);
    const auto start = [from, from_stride](std::size_t r, std::size_t c) {
        return from + static_cast<std::int64_t>(r) * from_stride + static_cast<std::int64_t>(c);
    };
    const auto target = [to, to_stride](std::size_t r, std::size_t c) {
        return to + static_cast<std::int64_t>(c) * to_stride + static_cast<std::int64_t>(r);
    };
    if (rows < kSide || columns < kSide) {
        for (std::size_t r = 0; r < rows; ++r) {
            for (std::size_t c = 0; c < columns; ++c) *target(r, c) = *start(r, c);
        }
        return;
    }
    const auto turn = [&](std::size_t r, std::size_t c) {
        // The last square of a row or column reaches back over the one before: the same words once more.
        const std::size_t row = std::min(r, rows - kSide), column = std::min(c, columns - kSide);
        typename Square::Vector square[kSide];
        for (std::size_t i = 0; i < kSide; ++i) std::memcpy(&square[i], start(row + i, column), sizeof square[i]);
        Square::turn(square);
        for (std::size_t i = 0; i < kSide; ++i) std::memcpy(target(row, column + i), &square[i], sizeof square[i]);
    };
    if constexpr (along == Along::from) {
        for (std::size_t r = 0; r < rows; r += kSide) {
            for (std::size_t i = r; i < std::min(r + kSide, rows); ++i) __builtin_prefetch(start(i, columns + kAhead));
            for (std::size_t c = 0; c < columns; c += kSide) turn(r, c);
        }
    } else {
        for (std::size_t c = 0; c < columns; c += kSide) {
            for (std::size_t i = c; i < std::min(c + kSide, columns); ++i) {
                __builtin_prefetch(target(rows + kAhead, i), 1);
            }
            for (std::size_t r = 0; r < rows; r += kSide) turn(r, c);
        }
    }
}

}  // namespace zenflow
