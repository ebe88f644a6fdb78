// The update rules, one struct each: `constants` of one update, and `update` of one element. Constants are computed in
// fp64 and rounded once; the element's arithmetic is fp32, in the order written.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernel.hpp"

namespace zenflow {

// One element's master weight and moments.
struct Element {
    float w;
    float moments[kMaxMoments];
};

inline float fp32(double value) {
    return static_cast<float>(value);
}

// Weight decay that is added to the gradient. At 0 nothing is: the sum would turn -0 into 0, and infinity into NaN.
[[gnu::always_inline]] inline float with_decay(float g, float w, float weight_decay, float decays) {
    return decays != 0 ? g + w * weight_decay : g;
}

[[gnu::always_inline]] inline void adam_step(Element& e, float g, const Constants& constants) {
    const auto& [rest1, beta2, rest2, step_size, inverse_root, eps, _6, _7] = constants.values;
    auto& [m, v] = e.moments;
    m = m + (g - m) * rest1;
    v = v * beta2 + (g * rest2) * g;
    e.w = e.w - (m * step_size) / (std::sqrt(v) * inverse_root + eps);
}

inline Constants adam_constants(std::span<const double> numbers, std::int64_t count) {
    const double lr = numbers[0], beta1 = numbers[1], beta2 = numbers[2], eps = numbers[3];
    const auto c = static_cast<double>(count);
    return {{fp32(1 - beta1), fp32(beta2), fp32(1 - beta2), fp32(lr / (1 - std::pow(beta1, c))),
             fp32(1 / std::sqrt(1 - std::pow(beta2, c))), fp32(eps)}};
}

struct AdamW {  // lr, beta1, beta2, eps, weight_decay
    static constexpr std::size_t kMoments = 2;
    static constexpr std::size_t kNumbers = 5;

    static Constants constants(std::span<const double> numbers, double decay, std::int64_t count) {
        Constants c = adam_constants(numbers, count);
        c.values[6] = fp32(decay);
        return c;
    }
    [[gnu::always_inline]] static void update(Element& e, float g, const Constants& constants) {
        e.w = e.w * constants.values[6];
        adam_step(e, g, constants);
    }
};

struct Adam {  // lr, beta1, beta2, eps, weight_decay
    static constexpr std::size_t kMoments = 2;
    static constexpr std::size_t kNumbers = 5;

    static Constants constants(std::span<const double> numbers, double, std::int64_t count) {
        Constants c = adam_constants(numbers, count);
        c.values[6] = fp32(numbers[4]);
        c.values[7] = fp32(numbers[4] != 0);
        return c;
    }
    [[gnu::always_inline]] static void update(Element& e, float g, const Constants& constants) {
        adam_step(e, with_decay(g, e.w, constants.values[6], constants.values[7]), constants);
    }
};

struct Adagrad {  // lr, lr_decay, eps, weight_decay
    static constexpr std::size_t kMoments = 1;
    static constexpr std::size_t kNumbers = 4;

    static Constants constants(std::span<const double> numbers, double, std::int64_t count) {
        const double rate = numbers[0] / (1 + static_cast<double>(count - 1) * numbers[1]);
        return {{fp32(rate), fp32(numbers[2]), fp32(numbers[3]), fp32(numbers[3] != 0)}};
    }
    [[gnu::always_inline]] static void update(Element& e, float g, const Constants& constants) {
        const auto& [rate, eps, weight_decay, decays, _4, _5, _6, _7] = constants.values;
        float& s = e.moments[0];
        g = with_decay(g, e.w, weight_decay, decays);
        s = s + g * g;
        e.w = e.w - (g * rate) / (std::sqrt(s) + eps);
    }
};

struct Lion {  // lr, beta1, beta2, weight_decay
    static constexpr std::size_t kMoments = 1;
    static constexpr std::size_t kNumbers = 4;

    static Constants constants(std::span<const double> numbers, double decay, std::int64_t) {
        return {{fp32(numbers[0]), fp32(1 - numbers[1]), fp32(1 - numbers[2]), fp32(decay)}};
    }
    [[gnu::always_inline]] static void update(Element& e, float g, const Constants& constants) {
        const auto& [lr, rest1, rest2, decay, _4, _5, _6, _7] = constants.values;
        float& m = e.moments[0];
        const float mixed = m + (g - m) * rest1;
        const float unsigned_zero = mixed + 0.0f;  // NaN stays NaN, -0 becomes 0
        const float sign = mixed > 0 ? 1.0f : mixed < 0 ? -1.0f : unsigned_zero;
        e.w = e.w * decay - sign * lr;
        m = m + (g - m) * rest2;
    }
};

struct Sgd {  // lr, momentum, dampening, weight_decay, nesterov
    static constexpr std::size_t kMoments = 1;
    static constexpr std::size_t kNumbers = 5;

    static bool has_momentum(const Constants& constants) { return constants.values[7] != 0; }

    static Constants constants(std::span<const double> numbers, double, std::int64_t count) {
        const double lr = numbers[0], momentum = numbers[1], dampening = numbers[2], weight_decay = numbers[3];
        return {{fp32(lr), fp32(weight_decay), fp32(weight_decay != 0), fp32(momentum), fp32(1 - dampening),
                 fp32(count == 1), fp32(numbers[4] != 0), fp32(momentum != 0)}};
    }
    [[gnu::always_inline]] static void update(Element& e, float g, const Constants& constants) {
        const auto& [lr, weight_decay, decays, momentum, rest, is_first, nesterov, _7] = constants.values;
        float& b = e.moments[0];
        g = with_decay(g, e.w, weight_decay, decays);
        b = is_first != 0 ? g : b * momentum + g * rest;
        e.w = e.w - (nesterov != 0 ? g + b * momentum : b) * lr;
    }
};

// Sgd with momentum 0: the moment is neither read nor written.
struct PlainSgd {
    static constexpr std::size_t kMoments = 0;

    [[gnu::always_inline]] static void update(Element& e, float g, const Constants& constants) {
        const auto& [lr, weight_decay, decays, _3, _4, _5, _6, _7] = constants.values;
        e.w = e.w - with_decay(g, e.w, weight_decay, decays) * lr;
    }
};

}  // namespace zenflow
