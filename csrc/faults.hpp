// Faults on purpose, for tests: a thread that throws, dies, or is late.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace zenflow {

// What a thread throws to end itself as if it had been killed.
struct ThreadDied {};

class Faults {
public:
    enum class Kind : std::uint8_t { none, fail, die, delay, jitter };

    // fail, die, delay: once, before the piece of work that comes after `pieces` others; delay lasts `seconds`.
    // Where fail and die have `seconds`, that piece is so late, and the next one fails.
    // jitter: before every piece, for up to `seconds`, drawn from `seed`.
    void arm(Kind kind, std::uint64_t pieces, double seconds, std::uint64_t seed);

    // Called by a thread before each piece of work. Throws what was armed.
    void before_piece() {
        if (armed_.load(std::memory_order_relaxed)) act();
    }

    // End every delay, now and later.
    void release();

private:
    void act();
    void delay(double seconds);

    std::atomic<bool> armed_{false};
    std::mutex mutex_;
    std::condition_variable released_cv_;
    bool released_ = false;
    Kind kind_ = Kind::none;
    std::uint64_t pieces_ = 0;
    double seconds_ = 0.0;
    std::uint64_t random_ = 0;
};

}  // namespace zenflow
