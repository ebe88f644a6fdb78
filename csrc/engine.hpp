// The host engine: a pool of threads, and the weights whose deferred columns it updates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "memory.hpp"
#include "pool.hpp"
#include "tasks.hpp"

namespace zenflow {

class Engine {
public:
    using Weight = std::size_t;

    // Throws what Pool does.
    explicit Engine(const std::vector<int>& cpus);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Memory that outlives the engine, and that no forked child has. Throws std::bad_alloc, std::system_error.
    Pages allocate(std::size_t bytes, std::size_t interval_bytes);

    // The memory of the columns is the caller's; it must live until the engine is closed.
    Weight add(const Columns& columns);

    // Queue a task on a weight. Throws std::invalid_argument, or std::runtime_error after a failure.
    Pool::Ticket update(Weight weight, std::vector<Part> parts, std::optional<Hyper> mean, Result result);
    Pool::Ticket read(Weight weight, std::size_t first, std::size_t targets, const std::byte* weights, Dtype dtype,
                      bool keep);
    Pool::Ticket unpack(Weight weight, std::vector<std::int64_t> slots, const std::byte* packed);

    // As the pool's, but nothing in a forked child: it has no threads to wait for, and their locks may be held for
    // ever.
    void stop();
    void close();

    Pool& pool() { return *pool_; }

private:
    bool forked() const;
    Columns columns_of(Weight weight);

    std::unique_ptr<Pool> pool_;
    long process_;  // that has the threads
    std::mutex mutex_;
    std::vector<Columns> weights_;
};

}  // namespace zenflow
