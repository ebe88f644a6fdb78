// Conversions against a slow version in fp64: every half, the values around every midpoint of two, random floats.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "../kernel.hpp"
#include "check.hpp"

namespace zenflow::test {
namespace {

struct Format {
    Dtype dtype;
    int mantissa_bits;
    int least_exponent;  // of a normal number
    std::uint16_t nan;

    int infinity() const { return (3 - 2 * least_exponent) << mantissa_bits; }
};

constexpr Format kFormats[] = {{Dtype::bf16, 7, -126, 0x7fc0}, {Dtype::fp16, 10, -14, 0x7e00}};

double slow_widen(const Format& f, std::uint16_t half) {
    const int magnitude = half & 0x7fff;
    const int field = magnitude >> f.mantissa_bits;
    const int fraction = magnitude & ((1 << f.mantissa_bits) - 1);
    double value = 0;
    if (magnitude > f.infinity()) {
        value = std::numeric_limits<double>::quiet_NaN();
    } else if (magnitude == f.infinity()) {
        value = std::numeric_limits<double>::infinity();
    } else if (field == 0) {
        value = std::ldexp(fraction, f.least_exponent - f.mantissa_bits);
    } else {
        value = std::ldexp(fraction + (1 << f.mantissa_bits), f.least_exponent + field - 1 - f.mantissa_bits);
    }
    return half & 0x8000 ? -value : value;
}

std::uint16_t slow_narrow(const Format& f, float value) {
    if (std::isnan(value)) return f.nan;
    const int sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isinf(value)) return static_cast<std::uint16_t>(sign | f.infinity());
    int exponent = 0;
    std::frexp(std::fabs(value), &exponent);
    exponent = value == 0 ? f.least_exponent : std::max(exponent - 1, f.least_exponent);
    // Exact in fp64; nearbyint rounds to nearest even.
    const double steps = std::nearbyint(std::ldexp(std::fabs(double{value}), f.mantissa_bits - exponent));
    const int magnitude = ((exponent - f.least_exponent) << f.mantissa_bits) + static_cast<int>(steps);
    return static_cast<std::uint16_t>(sign | std::min(magnitude, f.infinity()));
}

void check_narrow(const Format& f, const std::vector<float>& values) {
    std::vector<std::uint16_t> halves(values.size());
    narrow(values.data(), halves.data(), f.dtype, values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        context = "narrow to " + std::to_string(static_cast<int>(f.dtype)) + " of " +
                  std::to_string(std::bit_cast<std::uint32_t>(values[i]));
        CHECK(halves[i] == slow_narrow(f, values[i]));
    }
}

void test_every_half(const Format& f) {
    std::vector<std::uint16_t> halves(0x10000);
    for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
    std::vector<float> widened(halves.size());
    widen(halves.data(), f.dtype, widened.data(), halves.size());
    for (const std::uint16_t half : halves) {
        context = "widen of " + std::to_string(half);
        const double expected = slow_widen(f, half);
        CHECK(std::isnan(expected) ? std::isnan(widened[half]) : widened[half] == expected);
        CHECK(std::signbit(widened[half]) == (half >= 0x8000));
    }
    std::vector<std::uint16_t> back(halves.size());
    narrow(widened.data(), back.data(), f.dtype, widened.size());
    for (const std::uint16_t half : halves) {
        context = "there and back of " + std::to_string(half);
        CHECK(back[half] == (std::isnan(widened[half]) ? f.nan : half));
    }
}

void test_around_midpoints(const Format& f) {
    std::vector<float> values;
    for (int half = 0; half <= f.infinity(); ++half) {
        const double here = slow_widen(f, static_cast<std::uint16_t>(half));
        // Beyond the largest number the next one would be a power of two.
        const double next = half + 1 >= f.infinity() ? std::ldexp(1.0, 2 - f.least_exponent)
                                                     : slow_widen(f, static_cast<std::uint16_t>(half + 1));
        const auto middle = static_cast<float>(std::isinf(here) ? here : here / 2 + next / 2);
        for (const float value : {middle, std::nextafterf(middle, 0.0f), std::nextafterf(middle, INFINITY)}) {
            values.push_back(value);
            values.push_back(-value);
        }
    }
    check_narrow(f, values);
}

}  // namespace

void test_convert(unsigned seed) {
    std::mt19937 random(seed);
    for (const Format& f : kFormats) {
        test_every_half(f);
        test_around_midpoints(f);
        std::vector<float> values(300'001);
        for (float& value : values) value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
        check_narrow(f, values);
        for (float& value : values) value = std::ldexp(static_cast<float>(random() % 4096) - 2048, -30 - random() % 12);
        check_narrow(f, values);
    }
    const float same[] = {-0.0f, 1.5f, std::numeric_limits<float>::denorm_min(), INFINITY};
    float copy[4];
    narrow(same, copy, Dtype::fp32, 4);
    for (int i = 0; i < 4; ++i) CHECK(std::bit_cast<std::uint32_t>(copy[i]) == std::bit_cast<std::uint32_t>(same[i]));
}

}  // namespace zenflow::test
