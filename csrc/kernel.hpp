// One pass over a run of elements that share every constant: gradients in, master, moments and result out.
//
// Results have the same bits wherever a run is split, however its elements are aligned, whichever instruction set is
// used, and whether S gradients come in one call or in S. Only which NaN a master or moment holds is left open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace zenflow {

enum class Dtype : std::uint8_t { fp32, bf16, fp16 };
enum class Rule : std::uint8_t { adamw, adam, adagrad, lion, sgd };

constexpr std::size_t kMaxMoments = 2;
constexpr std::size_t kMaxNumbers = 5;  // hyperparameters of a rule

// What one update needs beside its gradient, the same for all elements of a run; rules.hpp says which value is which.
struct Constants {
    float values[8];
};

// Logged gradients of a run.
struct Gradient {
    const void* data;  // aligned to its element
    Dtype dtype;
    float factor;
};

struct Run {
    std::size_t size;  // elements
    float* master;
    float* moments[kMaxMoments];  // null beyond the rule's; sgd's is not touched without momentum, and may be null
    void* result;                 // null: none is wanted
    Dtype result_dtype;
    // How many times the last update is added to the result alone: where it will be seen, some updates are missing.
    float coast = 0;
};

std::size_t element_bytes(Dtype dtype);
std::size_t moments_of(Rule rule);
std::size_t numbers_of(Rule rule);

// The fp32 constants of update number `count` (from 1) with these hyperparameters (numbers_of(rule) of them).
Constants constants_of(Rule rule, std::span<const double> numbers, double decay, std::int64_t count);
// Whether an update with these hyperparameters increments the count.
bool counts(Rule rule, std::span<const double> numbers);

// One update per gradient, in order; gradients and constants are of equal size. Nothing but the result is written when
// they are empty. No two of the ranges overlap, except that gradients may.
void replay(Rule rule, const Run& run, std::span<const Gradient> gradients, std::span<const Constants> constants);
// One update with the mean of the gradients (at least one).
void average(Rule rule, const Run& run, std::span<const Gradient> gradients, const Constants& constants);

// Conversions of n elements, to nearest even; the ranges do not overlap. A NaN becomes bf16 0x7fc0 or fp16 0x7e00.
void widen(const void* source, Dtype dtype, float* target, std::size_t n);
void narrow(const float* source, void* target, Dtype dtype, std::size_t n);

}  // namespace zenflow
