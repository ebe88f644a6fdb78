// One element between fp32 and its stored format: to nearest even, denormals exact, every NaN the same one. Integer
// code without branches, so that loops of it vectorise; no denormal product, so that a thread's flush-to-zero mode is
// no matter.
#pragma once

#include <bit>
#include <cstdint>

namespace zenflow {

struct Fp32 {
    using Stored = float;
    [[gnu::always_inline]] static float widen(Stored value) { return value; }
    [[gnu::always_inline]] static Stored narrow(float value) { return value; }
};

struct Bf16 {
    using Stored = std::uint16_t;
    [[gnu::always_inline]] static float widen(Stored half) {
        return std::bit_cast<float>(static_cast<std::uint32_t>(half) << 16);
    }
    [[gnu::always_inline]] static Stored narrow(float value) {
        const auto bits = std::bit_cast<std::uint32_t>(value);
        const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        return static_cast<Stored>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
};

struct Fp16 {
    using Stored = std::uint16_t;
    [[gnu::always_inline]] static float widen(Stored half) {
        const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16;
        const std::uint32_t magnitude = half & 0x7fff;
        const std::uint32_t normal = (magnitude << 13) + ((127 - 15) << 23);
        const std::uint32_t special = (magnitude << 13) | 0x7f800000;  // infinity, NaN
        const auto denormal =
            std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
        const std::uint32_t finite = magnitude < 0x0400 ? denormal : normal;
        return std::bit_cast<float>(sign | (magnitude < 0x7c00 ? finite : special));
    }
    [[gnu::always_inline]] static Stored narrow(float value) {
        const auto bits = std::bit_cast<std::uint32_t>(value);
        const std::uint32_t magnitude = bits & 0x7fffffff;
        const std::uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        // Below 2^-14: the last bit of a sum with 0.5 is worth 2^-24, so the addition rounds.
        const std::uint32_t denormal =
            std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<std::uint32_t>(0.5f);
        const std::uint32_t finite = magnitude < 0x38800000 ? denormal : normal;
        const std::uint32_t rounded = magnitude < 0x47800000 ? finite : 0x7c00;  // from 2^16 on infinity
        return static_cast<Stored>(magnitude > 0x7f800000 ? 0x7e00 : rounded | ((bits >> 16) & 0x8000));
    }
};

}  // namespace zenflow
