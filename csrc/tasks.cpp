#include "tasks.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace zenflow {
namespace {

constexpr std::size_t kGrain = 1 << 15;  // elements a thread takes at a time: tens of microseconds
constexpr std::size_t kPiece = 1024;     // elements
constexpr std::size_t kWord = 4;         // bytes

std::size_t row_of(const std::vector<std::int64_t>& index, std::size_t i, std::size_t first = 0) {
    return index.empty() ? first + i : static_cast<std::size_t>(index[i]);
}

// Whether i + 1 comes right behind i.
bool follows(const std::vector<std::int64_t>& index, std::size_t i) {
    return index.empty() || index[i + 1] == index[i] + 1;
}

// The extent that holds an element of an entry, and how many elements from there on it holds.
Extent find(const Entry& entry, std::size_t element) {
    for (const Extent& extent : entry.extents) {
        if (element < extent.elements) {
            return {extent.data + element * element_bytes(entry.dtype), extent.elements - element};
        }
        element -= extent.elements;
    }
    throw std::out_of_range("an entry of the gradient log is too short");
}

std::size_t packed_words(const Columns& columns) {
    return columns.rows * (1 + moments_of(columns.rule)) + 1;
}

void check_index(const std::vector<std::int64_t>& index, std::size_t size, std::size_t limit, const char* name) {
    if (index.empty()) return;
    if (index.size() != size) throw std::invalid_argument(std::string(name) + " has the wrong length");
    for (const std::int64_t row : index) {
        if (row < 0 || static_cast<std::size_t>(row) >= limit) {
            throw std::invalid_argument(std::string(name) + " is out of range");
        }
    }
}

void check_range(const Columns& columns, std::size_t first, std::size_t targets) {
    if (first > columns.columns || targets > columns.columns - first) {
        throw std::invalid_argument("slots are out of range");
    }
}

}  // namespace

// Addresses and constants of the run at hand, kept between runs so that nothing is allocated in the loop.
struct Update::Cut {
    std::vector<Gradient> gradients;
    std::vector<Constants> constants;
    std::int64_t count = -1;  // that the constants belong to
};

Update::Update(const Columns& columns, std::vector<Part> parts, std::optional<Hyper> mean, Result result)
    : columns_(columns), parts_(std::move(parts)), mean_(mean), result_(result) {
    std::size_t targets = 0;
    for (const Part& part : parts_) targets += part.targets;
    for (const Part& part : parts_) {
        if (part.slots.empty()) check_range(columns_, part.first, part.targets);
        check_index(part.slots, part.targets, columns_.columns, "slots");
        check_index(part.out, part.targets, targets, "out");
        for (const Entry& entry : part.entries) {
            std::size_t elements = 0;
            for (const Extent& extent : entry.extents) elements += extent.elements;
            const std::size_t rows = columns_.rows == 0 ? part.targets : elements / columns_.rows;
            check_index(entry.rows, part.targets, rows, "rows");
            if (entry.rows.empty() && rows < part.targets) throw std::invalid_argument("an entry is too short");
        }
        size_ += part.targets * columns_.rows;
    }
}

std::size_t Update::grain() const {
    return kGrain;
}

void Update::run(std::size_t begin, std::size_t end) {
    for (const Part& part : parts_) {
        const std::size_t size = part.targets * columns_.rows;
        if (begin < size) run_part(part, begin, std::min(end, size));
        if (end <= size) return;
        begin -= std::min(begin, size);
        end -= size;
    }
}

void Update::run_part(const Part& part, std::size_t begin, std::size_t end) {
    Cut cut;
    for (std::size_t at = begin; at < end;) {
        const std::size_t target = at / columns_.rows;
        const std::size_t element = at % columns_.rows;
        const std::size_t size = run_length(part, target, element, end - at);
        apply(part, target, element, size, cut);
        at += size;
    }
}

// Elements from there on that lie behind each other everywhere and share a count.
std::size_t Update::run_length(const Part& part, std::size_t target, std::size_t element, std::size_t most) const {
    const std::size_t rows = columns_.rows;
    std::size_t size = std::min(most, rows - element);
    const std::int32_t count = columns_.count[row_of(part.slots, target, part.first)];
    for (std::size_t i = target; size < most; ++i) {
        bool together = result_.kind != Result::Kind::packed && follows(part.slots, i) && follows(part.out, i) &&
                        columns_.count[row_of(part.slots, i, part.first) + 1] == count;
        for (const Entry& entry : part.entries) together = together && follows(entry.rows, i);
        if (!together) break;
        size = std::min(most, size + rows);
    }
    for (const Entry& entry : part.entries) {
        size = std::min(size, find(entry, row_of(entry.rows, target) * rows + element).elements);
    }
    return size;
}

void Update::apply(const Part& part, std::size_t target, std::size_t element, std::size_t size, Cut& cut) const {
    const std::size_t slot = row_of(part.slots, target, part.first);
    const std::size_t at = slot * columns_.rows + element;
    cut.gradients.clear();
    for (const Entry& entry : part.entries) {
        const Extent extent = find(entry, row_of(entry.rows, target) * columns_.rows + element);
        cut.gradients.push_back({extent.data, entry.dtype, entry.factor});
    }
    if (cut.count != columns_.count[slot]) set_constants(part, columns_.count[slot], cut);

    Run run{size, columns_.master + at, {}, nullptr, result_.dtype};
    for (std::size_t m = 0; m < moments_of(columns_.rule); ++m) run.moments[m] = columns_.moments[m] + at;
    const std::size_t out = row_of(part.out, target);
    if (result_.kind == Result::Kind::weights) {
        run.result = result_.data + (out * columns_.rows + element) * element_bytes(result_.dtype);
        run.coast = result_.coast;
    }
    if (mean_ && !part.entries.empty()) {
        average(columns_.rule, run, cut.gradients, cut.constants.front());
    } else {
        replay(columns_.rule, run, cut.gradients, cut.constants);
    }
    if (result_.kind == Result::Kind::packed) pack(slot, out, element, size);
}

void Update::set_constants(const Part& part, std::int64_t count, Cut& cut) const {
    cut.count = count;
    cut.constants.clear();
    const std::size_t numbers = numbers_of(columns_.rule);
    const auto add = [&](const Hyper& hyper) {
        count += counts(columns_.rule, {hyper.numbers.data(), numbers}) ? 1 : 0;
        cut.constants.push_back(constants_of(columns_.rule, {hyper.numbers.data(), numbers}, hyper.decay, count));
    };
    if (mean_) {
        add(*mean_);
    } else {
        for (const Entry& entry : part.entries) add(entry.hyper);
    }
}

// Copies elements of one column's streams behind each other; its count follows in `finish`.
void Update::pack(std::size_t slot, std::size_t out, std::size_t element, std::size_t size) const {
    std::byte* row = result_.data + out * packed_words(columns_) * kWord;
    const float* streams[1 + kMaxMoments] = {columns_.master, columns_.moments[0], columns_.moments[1]};
    for (std::size_t s = 0; s < 1 + moments_of(columns_.rule); ++s) {
        std::memcpy(row + (s * columns_.rows + element) * kWord, streams[s] + slot * columns_.rows + element,
                    size * kWord);
    }
}

std::int32_t Update::increments(const Part& part) const {
    const std::size_t numbers = numbers_of(columns_.rule);
    const auto one = [&](const Hyper& hyper) { return counts(columns_.rule, {hyper.numbers.data(), numbers}) ? 1 : 0; };
    if (part.entries.empty()) return 0;
    if (mean_) return one(*mean_);
    std::int32_t sum = 0;
    for (const Entry& entry : part.entries) sum += one(entry.hyper);
    return sum;
}

// Counts change last: until then every piece of a column reads the one it had before.
void Update::finish() {
    for (const Part& part : parts_) {
        const std::int32_t more = increments(part);
        for (std::size_t i = 0; i < part.targets; ++i) {
            std::int32_t& count = columns_.count[row_of(part.slots, i, part.first)];
            count += more;
            if (result_.kind != Result::Kind::packed) continue;
            const std::size_t words = packed_words(columns_);
            std::memcpy(result_.data + (row_of(part.out, i) * words + words - 1) * kWord, &count, kWord);
        }
    }
}

ReadMasters::ReadMasters(const Columns& columns, std::size_t first, std::size_t targets, const std::byte* weights,
                         Dtype dtype, bool keep)
    : master_(columns.master + first * columns.rows),
      weights_(weights),
      dtype_(dtype),
      keep_(keep),
      size_(targets * columns.rows) {
    check_range(columns, first, targets);
}

std::size_t ReadMasters::grain() const {
    return kGrain;
}

void ReadMasters::run(std::size_t begin, std::size_t end) {
    std::array<std::byte, kPiece * 4> narrowed;
    std::array<float, kPiece> rounded, weights;
    for (std::size_t at = begin; at < end; at += kPiece) {
        const std::size_t n = std::min(kPiece, end - at);
        float* master = master_ + at;
        widen(weights_ + at * element_bytes(dtype_), dtype_, weights.data(), n);
        if (keep_) {
            narrow(master, narrowed.data(), dtype_, n);
            widen(narrowed.data(), dtype_, rounded.data(), n);
        }
        for (std::size_t i = 0; i < n; ++i) master[i] = keep_ && rounded[i] == weights[i] ? master[i] : weights[i];
    }
}

Unpack::Unpack(const Columns& columns, std::vector<std::int64_t> slots, const std::byte* packed)
    : columns_(columns), slots_(std::move(slots)), packed_(packed) {
    check_index(slots_, slots_.size(), columns_.columns, "slots");
}

std::size_t Unpack::grain() const {
    return std::max<std::size_t>(1, kGrain / std::max<std::size_t>(1, columns_.rows));
}

void Unpack::run(std::size_t begin, std::size_t end) {
    float* streams[1 + kMaxMoments] = {columns_.master, columns_.moments[0], columns_.moments[1]};
    const std::size_t bytes = columns_.rows * kWord;
    for (std::size_t i = begin; i < end; ++i) {
        const auto slot = static_cast<std::size_t>(slots_[i]);
        const std::byte* row = packed_ + i * packed_words(columns_) * kWord;
        for (std::size_t s = 0; s < 1 + moments_of(columns_.rule); ++s) {
            std::memcpy(streams[s] + slot * columns_.rows, row + s * bytes, bytes);
        }
        std::memcpy(&columns_.count[slot], row + (1 + moments_of(columns_.rule)) * bytes, kWord);
    }
}

}  // namespace zenflow
