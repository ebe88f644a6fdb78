// What the host does with the deferred columns of one weight: take in masters, apply a window, take over moved columns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernel.hpp"
#include "pool.hpp"

namespace zenflow {

// The deferred columns of one weight, one row of memory each; the memory is the caller's.
struct Columns {
    Rule rule;
    std::size_t columns;
    std::size_t rows;             // elements of a column
    float* master;                // [columns, rows]
    float* moments[kMaxMoments];  // likewise; null beyond the rule's
    std::int32_t* count;          // [columns], updates so far
};

using Numbers = std::array<double, kMaxNumbers>;

// Hyperparameters of one update.
struct Hyper {
    Numbers numbers;
    double decay;
};

// Contiguous part of a logged gradient.
struct Extent {
    const std::byte* data;
    std::size_t elements;
};

// One step's gradient: packed rows, the concatenation of its extents.
struct Entry {
    std::vector<Extent> extents;
    Dtype dtype;
    float factor;
    Hyper hyper;
    std::vector<std::int64_t> rows;  // which packed row belongs to each target; empty: row i to target i
};

// Targets that share a log. Target i is slot `slots[i]`, or `first + i` where that is empty.
struct Part {
    std::size_t first;
    std::size_t targets;
    std::vector<std::int64_t> slots;
    std::vector<Entry> entries;     // those that count, in order
    std::vector<std::int64_t> out;  // row of the result that belongs to each target; empty: i; below the sum of targets
};

// Where an update leaves its outcome.
struct Result {
    enum class Kind : std::uint8_t { none, weights, packed };
    Kind kind = Kind::none;
    std::byte* data = nullptr;
    Dtype dtype = Dtype::fp32;  // of weights: [n, rows]. packed: [n, rows * (1 + moments) + 1] words of 32 bits
    float coast = 0;            // of weights: how many times the last update is added to them
};

// Applies the entries to the targets: replayed, or averaged into one update with the hyperparameters of `mean`.
class Update : public Work {
public:
    // Throws std::invalid_argument.
    Update(const Columns& columns, std::vector<Part> parts, std::optional<Hyper> mean, Result result);
    std::size_t size() const override { return size_; }
    std::size_t grain() const override;
    void run(std::size_t begin, std::size_t end) override;
    void finish() override;

private:
    struct Cut;  // where a run stands
    void run_part(const Part& part, std::size_t begin, std::size_t end);
    std::size_t run_length(const Part& part, std::size_t target, std::size_t element, std::size_t most) const;
    void apply(const Part& part, std::size_t target, std::size_t element, std::size_t size, Cut& cut) const;
    void set_constants(const Part& part, std::int64_t count, Cut& cut) const;
    void pack(std::size_t slot, std::size_t out, std::size_t element, std::size_t size) const;
    std::int32_t increments(const Part& part) const;

    Columns columns_;
    std::vector<Part> parts_;
    std::optional<Hyper> mean_;
    Result result_;
    std::size_t size_ = 0;
};

// Takes masters from weights [targets, rows] in some dtype; with `keep`, a master that rounds to its weight stays.
class ReadMasters : public Work {
public:
    ReadMasters(const Columns& columns, std::size_t first, std::size_t targets, const std::byte* weights, Dtype dtype,
                bool keep);
    std::size_t size() const override { return size_; }
    std::size_t grain() const override;
    void run(std::size_t begin, std::size_t end) override;

private:
    float* master_;
    const std::byte* weights_;
    Dtype dtype_;
    bool keep_;
    std::size_t size_;
};

// Takes over the state of columns that was packed elsewhere.
class Unpack : public Work {
public:
    Unpack(const Columns& columns, std::vector<std::int64_t> slots, const std::byte* packed);
    std::size_t size() const override { return slots_.size(); }
    std::size_t grain() const override;
    void run(std::size_t begin, std::size_t end) override;

private:
    Columns columns_;
    std::vector<std::int64_t> slots_;
    const std::byte* packed_;
};

}  // namespace zenflow
