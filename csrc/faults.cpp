#include "faults.hpp"

#include <chrono>
#include <stdexcept>
#include <utility>

namespace zenflow {

void Faults::arm(Kind kind, std::uint64_t pieces, double seconds, std::uint64_t seed) {
    const std::lock_guard lock(mutex_);
    kind_ = kind;
    pieces_ = pieces;
    seconds_ = seconds;
    random_ = seed * 2 + 1;  // the generator's state must not be 0
    armed_.store(kind != Kind::none);
}

void Faults::release() {
    const std::lock_guard lock(mutex_);
    released_ = true;
    released_cv_.notify_all();
}

void Faults::act() {
    double seconds = 0.0;
    {
        const std::lock_guard lock(mutex_);
        if (kind_ == Kind::jitter) {
            random_ ^= random_ << 13;  // xorshift64 (Marsaglia 2003)
            random_ ^= random_ >> 7;
            random_ ^= random_ << 17;
            seconds = seconds_ * static_cast<double>(random_ >> 11) * 0x1p-53;
        } else {
            if (kind_ == Kind::none || pieces_-- > 0) return;
            const Kind kind = kind_;
            seconds = std::exchange(seconds_, 0.0);
            if (kind == Kind::delay || seconds == 0.0) {
                kind_ = Kind::none;
                armed_.store(false);
                if (kind == Kind::fail) throw std::runtime_error("a failure was injected");
                if (kind == Kind::die) throw ThreadDied{};
            } else {
                pieces_ = 0;
            }
        }
    }
    delay(seconds);
}

void Faults::delay(double seconds) {
    std::unique_lock lock(mutex_);
    released_cv_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return released_; });
}

}  // namespace zenflow
