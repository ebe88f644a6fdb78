// A run is taken in blocks so small that their state stays in registers or the first-level cache while all entries are
// applied: memory is passed over once, however many entries there are. What is left at the end of a run goes through
// the same code in a padded copy, so that results do not depend on where a run is split.

#include "kernel.hpp"

#include <cstring>

#include "blocks.hpp"
#include "clones.hpp"
#include "convert.hpp"
#include "rules.hpp"

namespace zenflow {
namespace {

// Calls function(Format{}) with the format of the dtype.
template <class Function>
[[gnu::always_inline]] inline void with_format(Dtype dtype, Function&& function) {
    switch (dtype) {
        case Dtype::fp32:
            return function(Fp32{});
        case Dtype::bf16:
            return function(Bf16{});
        case Dtype::fp16:
            return function(Fp16{});
    }
}

template <class Function>
auto with_rule(Rule rule, Function&& function) {
    switch (rule) {
        case Rule::adamw:
            return function(AdamW{});
        case Rule::adam:
            return function(Adam{});
        case Rule::adagrad:
            return function(Adagrad{});
        case Rule::lion:
            return function(Lion{});
        case Rule::sgd:
            break;
    }
    return function(Sgd{});
}

template <class Format>
[[gnu::always_inline]] inline const typename Format::Stored* elements(const void* data, std::size_t first) {
    return static_cast<const typename Format::Stored*>(data) + first;
}

const void* offset(const void* data, Dtype dtype, std::size_t first) {
    return static_cast<const std::byte*>(data) + first * element_bytes(dtype);
}

void* offset(void* data, Dtype dtype, std::size_t first) {
    return static_cast<std::byte*>(data) + first * element_bytes(dtype);
}

template <class R>
[[gnu::always_inline]] inline void fetch_state(const Run& run, std::size_t first) {
    fetch(run.master + first);
    for (std::size_t k = 0; k < R::kMoments; ++k) fetch(run.moments[k] + first);
    if (run.result == nullptr) return;
    with_format(run.result_dtype, [&](auto format) __attribute__((always_inline)) {
        fetch(elements<decltype(format)>(run.result, first));
    });
}

// Where a weight will be after the updates that it misses, if no more gradients came.
[[gnu::always_inline]] inline float coasted(float after, float before, float factor) {
    return after + (after - before) * factor;
}

// With `shown`, also what the run's result is to show of the block.
template <class R, class Format, bool kCoasts = false>
[[gnu::always_inline]] inline void update_block(const Run& run, std::size_t first,
                                                const typename Format::Stored* __restrict gradient, float factor,
                                                const Constants& constants, float* __restrict shown = nullptr) {
    const Constants c = constants;  // the stores below cannot change a local copy
    const float coast = run.coast;
    float* __restrict w = run.master + first;
    float* __restrict m0 = R::kMoments > 0 ? run.moments[0] + first : nullptr;
    float* __restrict m1 = R::kMoments > 1 ? run.moments[1] + first : nullptr;
    for (std::size_t i = 0; i < kBlock; ++i) {
        Element e{w[i], {R::kMoments > 0 ? m0[i] : 0.0f, R::kMoments > 1 ? m1[i] : 0.0f}};
        R::update(e, Format::widen(gradient[i]) * factor, c);
        if constexpr (kCoasts) shown[i] = coasted(e.w, w[i], coast);
        w[i] = e.w;
        if constexpr (R::kMoments > 0) m0[i] = e.moments[0];
        if constexpr (R::kMoments > 1) m1[i] = e.moments[1];
    }
}

template <class Format>
[[gnu::always_inline]] inline void narrow_elements(const float* __restrict source,
                                                   typename Format::Stored* __restrict target, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) target[i] = Format::narrow(source[i]);
}

[[gnu::always_inline]] inline void write_result(const Run& run, std::size_t first, const float* source) {
    if (run.result == nullptr) return;
    with_format(run.result_dtype, [&](auto format) __attribute__((always_inline)) {
        using Format = decltype(format);
        narrow_elements<Format>(source, static_cast<typename Format::Stored*>(run.result) + first, kBlock);
    });
}

// The run's whole blocks.
template <class R>
ZENFLOW_CLONES void replay_blocks(const Run& run, std::span<const Gradient> gradients,
                                  std::span<const Constants> constants) {
    const bool coasts = run.coast != 0 && run.result != nullptr;
    for (std::size_t first = 0; first + kBlock <= run.size; first += kBlock) {
        fetch_state<R>(run, first);
        float shown[kBlock];
        for (std::size_t s = 0; s < gradients.size(); ++s) {
            const Gradient& g = gradients[s];
            with_format(g.dtype, [&](auto format) __attribute__((always_inline)) {
                using Format = decltype(format);
                const auto* gradient = elements<Format>(g.data, first);
                fetch(gradient);
                if (coasts && s + 1 == gradients.size()) {
                    update_block<R, Format, true>(run, first, gradient, g.factor, constants[s], shown);
                } else {
                    update_block<R, Format>(run, first, gradient, g.factor, constants[s]);
                }
            });
        }
        write_result(run, first, coasts ? shown : run.master + first);
    }
}

template <class Format>
[[gnu::always_inline]] inline void add_block(float* __restrict total,
                                             const typename Format::Stored* __restrict gradient, float factor,
                                             bool is_first) {
    if (is_first) {
        for (std::size_t i = 0; i < kBlock; ++i) total[i] = Format::widen(gradient[i]) * factor;
    } else {
        for (std::size_t i = 0; i < kBlock; ++i) total[i] = total[i] + Format::widen(gradient[i]) * factor;
    }
}

template <class R>
ZENFLOW_CLONES void average_blocks(const Run& run, std::span<const Gradient> gradients, const Constants& constants) {
    alignas(64) float mean[kBlock];
    const auto n = static_cast<float>(gradients.size());
    for (std::size_t first = 0; first + kBlock <= run.size; first += kBlock) {
        fetch_state<R>(run, first);
        for (std::size_t s = 0; s < gradients.size(); ++s) {
            const Gradient& g = gradients[s];
            with_format(g.dtype, [&](auto format) __attribute__((always_inline)) {
                using Format = decltype(format);
                const auto* gradient = elements<Format>(g.data, first);
                fetch(gradient);
                add_block<Format>(mean, gradient, g.factor, s == 0);
            });
        }
        for (std::size_t i = 0; i < kBlock; ++i) mean[i] = mean[i] / n;
        update_block<R, Fp32>(run, first, mean, 1.0f, constants);
        write_result(run, first, run.master + first);
    }
}

ZENFLOW_CLONES void add_padded(float* total, const void* gradient, Dtype dtype, float factor, bool is_first) {
    with_format(dtype, [&](auto format) __attribute__((always_inline)) {
        using Format = decltype(format);
        add_block<Format>(total, elements<Format>(gradient, 0), factor, is_first);
    });
}

// What is left of a run after its whole blocks, in memory of a whole block.
template <class R>
void replay_rest(const Run& rest, std::span<const Gradient> gradients, std::size_t first,
                 std::span<const Constants> constants) {
    const std::size_t state_bytes = rest.size * sizeof(float);
    float state[1 + kMaxMoments][kBlock] = {};
    float gradient[kBlock] = {};
    float before[kBlock];
    std::memcpy(state[0], rest.master, state_bytes);
    for (std::size_t k = 0; k < R::kMoments; ++k) std::memcpy(state[1 + k], rest.moments[k], state_bytes);

    const Run padded{kBlock, state[0], {state[1], state[2]}, nullptr, Dtype::fp32};
    for (std::size_t s = 0; s < gradients.size(); ++s) {
        const Gradient& g = gradients[s];
        std::memcpy(gradient, offset(g.data, g.dtype, first), rest.size * element_bytes(g.dtype));
        const Gradient copied{gradient, g.dtype, g.factor};
        std::memcpy(before, state[0], sizeof before);
        replay_blocks<R>(padded, {&copied, 1}, constants.subspan(s, 1));
    }
    std::memcpy(rest.master, state[0], state_bytes);
    for (std::size_t k = 0; k < R::kMoments; ++k) std::memcpy(rest.moments[k], state[1 + k], state_bytes);
    if (rest.coast != 0) {
        for (std::size_t i = 0; i < rest.size; ++i) state[0][i] = coasted(state[0][i], before[i], rest.coast);
    }
    if (rest.result != nullptr) narrow(state[0], rest.result, rest.result_dtype, rest.size);
}

template <class R>
void average_rest(const Run& rest, std::span<const Gradient> gradients, std::size_t first, const Constants& constants) {
    float mean[kBlock] = {};
    float gradient[kBlock] = {};
    for (std::size_t s = 0; s < gradients.size(); ++s) {
        const Gradient& g = gradients[s];
        std::memcpy(gradient, offset(g.data, g.dtype, first), rest.size * element_bytes(g.dtype));
        add_padded(mean, gradient, g.dtype, g.factor, s == 0);
    }
    for (float& total : mean) total = total / static_cast<float>(gradients.size());
    const Gradient averaged{mean, Dtype::fp32, 1.0f};
    replay_rest<R>(rest, {&averaged, 1}, 0, {&constants, 1});
}

Run from(const Run& run, std::size_t first) {
    Run rest = run;
    rest.size -= first;
    rest.master += first;
    for (float*& moment : rest.moments) {
        if (moment != nullptr) moment += first;
    }
    if (rest.result != nullptr) rest.result = offset(rest.result, rest.result_dtype, first);
    return rest;
}

template <class R>
void replay_run(const Run& run, std::span<const Gradient> gradients, std::span<const Constants> constants) {
    const std::size_t whole = run.size / kBlock * kBlock;
    if (whole > 0) replay_blocks<R>(run, gradients, constants);
    if (whole < run.size) replay_rest<R>(from(run, whole), gradients, whole, constants);
}

template <class R>
void average_run(const Run& run, std::span<const Gradient> gradients, const Constants& constants) {
    const std::size_t whole = run.size / kBlock * kBlock;
    if (whole > 0) average_blocks<R>(run, gradients, constants);
    if (whole < run.size) average_rest<R>(from(run, whole), gradients, whole, constants);
}

// The entries in stretches that all have momentum, or all have none.
void replay_sgd(Run run, std::span<const Gradient> gradients, std::span<const Constants> constants) {
    void* const result = run.result;
    while (!gradients.empty()) {
        const bool momentum = Sgd::has_momentum(constants[0]);
        std::size_t n = 1;
        while (n < gradients.size() && Sgd::has_momentum(constants[n]) == momentum) ++n;
        run.result = n == gradients.size() ? result : nullptr;
        const auto replay_stretch = momentum ? replay_run<Sgd> : replay_run<PlainSgd>;
        replay_stretch(run, gradients.first(n), constants.first(n));
        gradients = gradients.subspan(n);
        constants = constants.subspan(n);
    }
}

}  // namespace

std::size_t element_bytes(Dtype dtype) {
    return dtype == Dtype::fp32 ? 4 : 2;
}

std::size_t moments_of(Rule rule) {
    return with_rule(rule, [](auto r) { return decltype(r)::kMoments; });
}

std::size_t numbers_of(Rule rule) {
    return with_rule(rule, [](auto r) { return decltype(r)::kNumbers; });
}

Constants constants_of(Rule rule, std::span<const double> numbers, double decay, std::int64_t count) {
    return with_rule(rule, [&](auto r) { return r.constants(numbers, decay, count); });
}

bool counts(Rule rule, std::span<const double> numbers) {
    return rule != Rule::sgd || numbers[1] != 0;
}

void replay(Rule rule, const Run& run, std::span<const Gradient> gradients, std::span<const Constants> constants) {
    if (gradients.empty()) {
        if (run.result != nullptr) narrow(run.master, run.result, run.result_dtype, run.size);
    } else if (rule == Rule::sgd) {
        replay_sgd(run, gradients, constants);
    } else {
        with_rule(rule, [&](auto r) { replay_run<decltype(r)>(run, gradients, constants); });
    }
}

void average(Rule rule, const Run& run, std::span<const Gradient> gradients, const Constants& constants) {
    if (rule == Rule::sgd && !Sgd::has_momentum(constants)) {
        average_run<PlainSgd>(run, gradients, constants);
    } else {
        with_rule(rule, [&](auto r) { average_run<decltype(r)>(run, gradients, constants); });
    }
}

ZENFLOW_CLONES void widen(const void* source, Dtype dtype, float* target, std::size_t n) {
    with_format(dtype, [&](auto format) __attribute__((always_inline)) {
        using Format = decltype(format);
        const auto* __restrict from = elements<Format>(source, 0);
        float* __restrict to = target;
        for (std::size_t i = 0; i < n; ++i) to[i] = Format::widen(from[i]);
    });
}

ZENFLOW_CLONES void narrow(const float* source, void* target, Dtype dtype, std::size_t n) {
    with_format(dtype, [&](auto format) __attribute__((always_inline)) {
        using Format = decltype(format);
        narrow_elements<Format>(source, static_cast<typename Format::Stored*>(target), n);
    });
}

}  // namespace zenflow
