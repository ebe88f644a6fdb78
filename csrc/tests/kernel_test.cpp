// Every rule against loops over plain floats, over sizes, alignments, dtypes, splits and special values.

#include "../kernel.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "reference.hpp"

namespace zenflow::test {
namespace {

using Random = std::mt19937;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kDenormal = std::numeric_limits<float>::denorm_min();
constexpr float kSpecial[] = {0.0f,     -0.0f,     kInfinity, -kInfinity, kNan,   kDenormal, -kDenormal,
                              1.5e-39f, -2.5e-38f, 3.4e38f,   -3.4e38f,   1e-20f, 6e-8f,     65519.0f};

// The same bits; which NaN is left open.
bool same(float a, float b) {
    return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

// n elements at an address that is aligned to an element and no more, between guards that nothing may write.
class Buffer {
public:
    Buffer(std::size_t n, std::size_t element_bytes, std::size_t misalignment)
        : begin_(kGuard + misalignment * element_bytes), end_(begin_ + n * element_bytes) {
        memory_.assign(end_ + kGuard, kByte);
    }
    void* data() { return memory_.data() + begin_; }
    float* floats() { return static_cast<float*>(data()); }
    const float* floats() const { return reinterpret_cast<const float*>(memory_.data() + begin_); }
    bool guarded() const {
        for (std::size_t i = 0; i < memory_.size(); ++i) {
            if ((i < begin_ || i >= end_) && memory_[i] != kByte) return false;
        }
        return true;
    }
    bool operator==(const Buffer& other) const {
        return std::equal(memory_.begin() + begin_, memory_.begin() + end_, other.memory_.begin() + other.begin_,
                          other.memory_.begin() + other.end_);
    }

private:
    static constexpr std::size_t kGuard = 256;  // bytes
    static constexpr std::uint8_t kByte = 0xa5;
    std::size_t begin_, end_;
    std::vector<std::uint8_t> memory_;
};

// What a run starts from; every run of a case gets its own copy.
struct Case {
    Rule rule = Rule::adamw;
    std::vector<double> numbers;
    std::size_t size = 0;
    std::size_t misalignment = 0;
    Dtype result_dtype = Dtype::bf16;
    std::vector<float> state[1 + kMaxMoments];
    std::vector<Buffer> data;
    std::vector<Gradient> gradients;
    std::vector<double> decays;
    std::vector<std::int64_t> counts;
    std::vector<Constants> constants;
    float coast = 0;
};

struct Memory {
    explicit Memory(const Case& c) : result(c.size, element_bytes(c.result_dtype), c.misalignment) {
        for (std::size_t k = 0; k < 1 + moments_of(c.rule); ++k) {
            state.emplace_back(c.size, sizeof(float), c.misalignment + k);
            std::copy(c.state[k].begin(), c.state[k].end(), state[k].floats());
        }
        run = {c.size, state[0].floats(), {}, result.data(), c.result_dtype};
        for (std::size_t k = 1; k < state.size(); ++k) run.moments[k - 1] = state[k].floats();
        run.coast = c.coast;
    }
    bool guarded() const {
        for (const Buffer& buffer : state) {
            if (!buffer.guarded()) return false;
        }
        return result.guarded();
    }
    bool operator==(const Memory& other) const {
        for (std::size_t k = 0; k < state.size(); ++k) {
            if (!std::equal(state[k].floats(), state[k].floats() + run.size, other.state[k].floats(), same))
                return false;
        }
        if (run.result_dtype != Dtype::fp32) return result == other.result;
        return std::equal(result.floats(), result.floats() + run.size, other.result.floats(), same);
    }

    std::vector<Buffer> state;
    Buffer result;
    Run run;
};

float number(Random& random, float scale, bool special) {
    if (special && random() % 4 == 0) return kSpecial[random() % std::size(kSpecial)];
    return std::uniform_real_distribution<float>(-scale, scale)(random);
}

std::vector<double> numbers_for(Rule rule, Random& random) {
    const double weight_decay = random() % 2 ? 0.0 : 0.02;
    switch (rule) {
        case Rule::adagrad:
            return {0.01, random() % 2 ? 0.0 : 1e-3, 1e-10, weight_decay};
        case Rule::lion:
            return {1e-3, 0.9, 0.99, weight_decay};
        case Rule::sgd: {
            const double momentum = random() % 3 ? 0.9 : 0.0;
            return {0.1, momentum, random() % 2 ? 0.0 : 0.1, weight_decay, static_cast<double>(random() % 2)};
        }
        default:
            return {1e-3, 0.9, 0.999, 1e-8, weight_decay};
    }
}

Case make_case(Rule rule, std::size_t size, std::size_t entries, bool special, Random& random) {
    Case c;
    c.rule = rule;
    c.numbers = numbers_for(rule, random);
    c.size = size;
    c.misalignment = random() % 5;
    c.result_dtype = static_cast<Dtype>(random() % 3);
    for (std::size_t k = 0; k < 1 + moments_of(rule); ++k) {
        for (std::size_t i = 0; i < size; ++i) {
            const float value = number(random, 1.0f, special);
            const bool is_square = k == 2 || (k == 1 && rule == Rule::adagrad);
            c.state[k].push_back(is_square && !special ? value * value : value);
        }
    }
    const std::int64_t first = random() % 3 == 0 ? 1'000'000 : static_cast<std::int64_t>(random() % 5 + 1);
    for (std::size_t s = 0; s < entries; ++s) {
        const auto dtype = static_cast<Dtype>(random() % 3);
        std::vector<float> values(size);
        for (float& value : values) value = number(random, 0.1f, special);
        c.data.emplace_back(size, element_bytes(dtype), (c.misalignment + s) % 3);
        narrow(values.data(), c.data[s].data(), dtype, size);
        c.gradients.push_back({c.data[s].data(), dtype, random() % 2 ? 1.0f : 0.37f});
        c.decays.push_back(1 - 1e-3 * c.numbers.back());
        c.counts.push_back(first + (counts(rule, c.numbers) ? static_cast<std::int64_t>(s) : 0));
        c.constants.push_back(constants_of(rule, c.numbers, c.decays[s], c.counts[s]));
    }
    context = "rule " + std::to_string(static_cast<int>(rule)) + ", size " + std::to_string(size) + ", entries " +
              std::to_string(entries) + ", result " + std::to_string(static_cast<int>(c.result_dtype)) +
              (special ? ", special" : "");
    return c;
}

std::vector<float> fp32_gradient(const Case& c, std::size_t s) {
    std::vector<float> g(c.size);
    widen(c.gradients[s].data, c.gradients[s].dtype, g.data(), c.size);
    for (float& x : g) x = x * c.gradients[s].factor;
    return g;
}

void check_against_reference(const Case& c, const Memory& memory, const std::vector<float>* expected,
                             const std::vector<float>& shown) {
    for (std::size_t k = 0; k < memory.state.size(); ++k) {
        const float* const floats = memory.state[k].floats();
        for (std::size_t i = 0; i < c.size; ++i) CHECK(same(floats[i], expected[k][i]));
    }
    Buffer result(c.size, element_bytes(c.result_dtype), c.misalignment);
    narrow(shown.data(), result.data(), c.result_dtype, c.size);
    if (c.result_dtype == Dtype::fp32) {  // which NaN it holds is left open
        CHECK(std::equal(shown.begin(), shown.end(), memory.result.floats(), same));
    } else {
        CHECK(memory.result == result);
    }
    CHECK(memory.guarded());
}

std::vector<Gradient> from(const Case& c, std::size_t first) {
    std::vector<Gradient> gradients = c.gradients;
    for (Gradient& g : gradients) {
        g.data = static_cast<const std::byte*>(g.data) + first * element_bytes(g.dtype);
    }
    return gradients;
}

Run part(const Run& run, std::size_t first, std::size_t n) {
    Run sub = run;
    sub.size = n;
    sub.master += first;
    for (float*& moment : sub.moments) moment = moment ? moment + first : nullptr;
    sub.result = static_cast<std::byte*>(run.result) + first * element_bytes(run.result_dtype);
    return sub;
}

// The run in parts of random size.
template <class Function>
void split(const Run& run, Random& random, Function&& function) {
    for (std::size_t first = 0; first < run.size;) {
        const std::size_t n = std::min<std::size_t>(run.size - first, 1 + random() % (random() % 2 ? 7 : 200));
        function(part(run, first, n), first);
        first += n;
    }
}

void test_replay(const Case& c, Random& random) {
    std::vector<float> expected[] = {c.state[0], c.state[1], c.state[2]};
    std::vector<float> before = c.state[0];
    for (std::size_t s = 0; s < c.gradients.size(); ++s) {
        before = expected[0];
        reference_update(c.rule, c.numbers, c.decays[s], c.counts[s], expected, fp32_gradient(c, s));
    }
    std::vector<float> shown = expected[0];
    if (c.coast != 0) {
        for (std::size_t i = 0; i < c.size; ++i) shown[i] = shown[i] + (shown[i] - before[i]) * c.coast;
    }
    Memory whole(c);
    replay(c.rule, whole.run, c.gradients, c.constants);
    check_against_reference(c, whole, expected, shown);

    Memory passes(c);
    for (std::size_t s = 0; s < c.gradients.size(); ++s) {
        Run run = passes.run;
        if (s + 1 < c.gradients.size()) run.result = nullptr;
        replay(c.rule, run, {&c.gradients[s], 1}, {&c.constants[s], 1});
    }
    CHECK(passes == whole);

    Case moved = c;
    moved.misalignment = random() % 16;
    Memory parts(moved);
    split(parts.run, random,
          [&](const Run& run, std::size_t first) { replay(c.rule, run, from(c, first), c.constants); });
    CHECK(parts == whole);
    CHECK(parts.guarded());
}

void test_average(const Case& c, Random& random) {
    std::vector<float> mean = fp32_gradient(c, 0);
    for (std::size_t s = 1; s < c.gradients.size(); ++s) {
        const std::vector<float> g = fp32_gradient(c, s);
        for (std::size_t i = 0; i < c.size; ++i) mean[i] = mean[i] + g[i];
    }
    for (float& x : mean) x = x / static_cast<float>(c.gradients.size());
    std::vector<float> expected[] = {c.state[0], c.state[1], c.state[2]};
    reference_update(c.rule, c.numbers, c.decays[0], c.counts[0], expected, mean);
    Memory whole(c);
    average(c.rule, whole.run, c.gradients, c.constants[0]);
    check_against_reference(c, whole, expected, expected[0]);

    Memory parts(c);
    split(parts.run, random,
          [&](const Run& run, std::size_t first) { average(c.rule, run, from(c, first), c.constants[0]); });
    CHECK(parts == whole);
    CHECK(parts.guarded());
}

void test_rules(Random& random) {
    std::vector<std::size_t> sizes(131);
    for (std::size_t i = 0; i < sizes.size(); ++i) sizes[i] = i;
    sizes.insert(sizes.end(), {1023, 4097, 20011});
    for (const Rule rule : {Rule::adamw, Rule::adam, Rule::adagrad, Rule::lion, Rule::sgd}) {
        for (const std::size_t size : sizes) {
            for (const bool special : {false, true}) {
                const Case c = make_case(rule, size, 1 + random() % 8, special, random);
                Case coasting = c;
                coasting.coast = 2.08f;
                test_replay(c, random);
                test_replay(coasting, random);
                test_average(c, random);
            }
        }
    }
}

void test_no_entries(Random& random) {
    for (const std::size_t size : {0, 1, 63, 64, 200}) {
        const Case c = make_case(Rule::adamw, size, 0, true, random);
        std::vector<float> expected[] = {c.state[0], c.state[1], c.state[2]};
        Memory memory(c);
        replay(c.rule, memory.run, {}, {});
        check_against_reference(c, memory, expected, expected[0]);
    }
}

// Only the entries with momentum touch the moment, which may be missing when there is none.
void test_momentum_that_changes(Random& random) {
    Case c = make_case(Rule::sgd, 200, 5, false, random);
    const double momenta[] = {0.0, 0.9, 0.9, 0.0, 0.5};
    std::vector<float> expected[] = {c.state[0], c.state[1], c.state[2]};
    for (std::size_t s = 0; s < 5; ++s) {
        c.numbers[1] = momenta[s];
        c.constants[s] = constants_of(c.rule, c.numbers, 1.0, c.counts[s]);
        reference_update(c.rule, c.numbers, 1.0, c.counts[s], expected, fp32_gradient(c, s));
    }
    Memory memory(c);
    replay(c.rule, memory.run, c.gradients, c.constants);
    check_against_reference(c, memory, expected, expected[0]);

    Memory plain(c);
    plain.run.moments[0] = nullptr;
    replay(c.rule, plain.run, {c.gradients.data(), 1}, {c.constants.data(), 1});
    average(c.rule, plain.run, c.gradients, c.constants[0]);
    CHECK(std::equal(c.state[1].begin(), c.state[1].end(), plain.state[1].floats(), same));
    CHECK(plain.guarded());
}

// An interpolation that underflows to -0 counts as 0, so that a weight of -0 keeps its sign.
void test_lion_at_negative_zero() {
    context = "lion at -0";
    const double numbers[] = {0.1, 0.9, 0.99, 0.0};
    const Constants constants = constants_of(Rule::lion, numbers, 1.0, 1);
    float w = -0.0f, m = -0.0f;
    const float g = -kDenormal;
    const Gradient gradient{&g, Dtype::fp32, 1.0f};
    replay(Rule::lion, {1, &w, {&m, nullptr}, nullptr, Dtype::fp32}, {&gradient, 1}, {&constants, 1});
    CHECK(same(w, -0.0f) && same(m, -0.0f));
}

void test_neighbours_in_threads(Random& random) {
    const Case c = make_case(Rule::adamw, 3001, 4, false, random);
    Memory whole(c), shared(c);
    replay(c.rule, whole.run, c.gradients, c.constants);
    {
        std::vector<std::jthread> threads;
        for (const std::size_t first : {0, 777, 1501}) {
            const std::size_t end = first == 0 ? 777 : first == 777 ? 1501 : 3001;
            threads.emplace_back(
                [&, first, end] { replay(c.rule, part(shared.run, first, end - first), from(c, first), c.constants); });
        }
    }
    CHECK(shared == whole);
}

void test_table() {
    context = "table";
    const std::size_t moments[] = {2, 2, 1, 1, 1}, numbers[] = {5, 5, 4, 4, 5};
    for (std::size_t i = 0; i < 5; ++i) {
        CHECK(moments_of(static_cast<Rule>(i)) == moments[i]);
        CHECK(numbers_of(static_cast<Rule>(i)) == numbers[i]);
    }
    CHECK(element_bytes(Dtype::fp32) == 4 && element_bytes(Dtype::bf16) == 2 && element_bytes(Dtype::fp16) == 2);
    const double plain[] = {0.1, 0.0, 0.0, 0.0, 0.0}, momentum[] = {0.1, 0.9, 0.0, 0.0, 0.0};
    CHECK(!counts(Rule::sgd, plain) && counts(Rule::sgd, momentum) && counts(Rule::adamw, plain));
}

}  // namespace

void test_kernel(unsigned seed) {
    Random random(seed);
    test_table();
    test_rules(random);
    test_no_entries(random);
    test_momentum_that_changes(random);
    test_lion_at_negative_zero();
    test_neighbours_in_threads(random);
}

}  // namespace zenflow::test
