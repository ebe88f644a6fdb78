// One update in plain loops, written from the papers and independent of rules.hpp.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../kernel.hpp"

namespace zenflow::test {

// state: master, then the moments; all of the gradient's length.
inline void reference_update(Rule rule, const std::vector<double>& h, double decay, std::int64_t count,
                             std::vector<float>* state, std::vector<float> gradient) {
    const double lr = h[0];
    const auto steps = static_cast<double>(count);
    const bool decoupled = rule == Rule::adamw || rule == Rule::lion;
    const double weight_decay = rule == Rule::adagrad || rule == Rule::lion || rule == Rule::sgd ? h[3] : h[4];
    for (std::size_t i = 0; i < gradient.size(); ++i) {
        float g = gradient[i];
        float& w = state[0][i];
        if (decoupled) w = w * float(decay);
        if (!decoupled && weight_decay != 0) g = g + w * float(weight_decay);

        if (rule == Rule::adamw || rule == Rule::adam) {
            float &m = state[1][i], &v = state[2][i];
            const float step_size = float(lr / (1 - std::pow(h[1], steps)));
            const float inverse_root = float(1 / std::sqrt(1 - std::pow(h[2], steps)));
            m = m + (g - m) * float(1 - h[1]);
            const float scaled = g * float(1 - h[2]);
            v = v * float(h[2]) + scaled * g;
            const float denominator = std::sqrt(v) * inverse_root + float(h[3]);
            w = w - (m * step_size) / denominator;
        } else if (rule == Rule::adagrad) {
            float& sum = state[1][i];
            sum = sum + g * g;
            const float rate = float(lr / (1 + (steps - 1) * h[1]));
            w = w - (g * rate) / (std::sqrt(sum) + float(h[2]));
        } else if (rule == Rule::lion) {
            float& m = state[1][i];
            const float mix = m + (g - m) * float(1 - h[1]);
            float sign = mix;  // NaN
            if (mix == 0) sign = 0.0f;
            if (mix > 0) sign = 1.0f;
            if (mix < 0) sign = -1.0f;
            w = w - sign * float(lr);
            m = m + (g - m) * float(1 - h[2]);
        } else {
            const double momentum = h[1];
            float direction = g;
            if (momentum != 0) {
                float& b = state[1][i];
                b = count == 1 ? g : b * float(momentum) + g * float(1 - h[2]);
                direction = h[4] != 0 ? g + b * float(momentum) : b;
            }
            w = w - direction * float(lr);
        }
    }
}

}  // namespace zenflow::test
