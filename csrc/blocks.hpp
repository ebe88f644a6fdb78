// How streams of memory are passed over: in blocks of a few cache lines, with the lines behind them fetched meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zenflow {

constexpr std::size_t kBlock = 64;  // elements; fixed, so that the loops over them unroll

// Elements from a block to the one that is fetched meanwhile: with a dozen streams the hardware guesses too late, and
// never across a page.
constexpr std::size_t kAhead = 2 * kBlock;

// Fetches what lies kAhead behind a block; beyond the end of a run, and even of the memory, that is harmless.
template <class Stored>
[[gnu::always_inline]] inline void fetch(const Stored* block) {
    constexpr std::size_t line = 64;  // bytes
    const auto begin = reinterpret_cast<std::uintptr_t>(block) + kAhead * sizeof(Stored);
    for (std::size_t i = 0; i < kBlock * sizeof(Stored); i += line) {
        __builtin_prefetch(reinterpret_cast<const void*>(begin + i));
    }
}

}  // namespace zenflow
