// Threads that work through a queue of tasks, one task after the other, each task on all threads at once.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "faults.hpp"

namespace zenflow {

// A piece of work over `size` units that may be cut anywhere.
class Work {
public:
    virtual ~Work() = default;
    virtual std::size_t size() const = 0;
    // Units that a thread takes at a time.
    virtual std::size_t grain() const = 0;
    // Called with disjoint ranges, from several threads at once.
    virtual void run(std::size_t begin, std::size_t end) = 0;
    // Called by one thread once all of it has run.
    virtual void finish() {}
};

// When a task ran, in seconds of the monotonic clock.
struct Span {
    double begin_s;
    double end_s;
};

// Units [begin, end) that belong to one of `threads` threads: what it takes first, and what it touches first.
struct Share {
    std::size_t begin, end;
};
constexpr std::size_t kShareUnits = 32;  // shares begin at multiples: a cache line of 2-byte elements
Share share_of(std::size_t size, std::size_t threads, std::size_t thread);

// Tasks run in order of submission; a task starts when the one before it is over. After a failure no task runs: what
// is queued, and what is submitted later, fails with it. Every method may be called from any thread.
class Pool {
public:
    // One thread for each entry: the core to run on, -1 for any. Throws std::system_error, std::invalid_argument.
    explicit Pool(const std::vector<int>& cpus);
    ~Pool();  // closes
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    using Ticket = std::uint64_t;

    // Throws std::runtime_error after a failure or `stop`.
    Ticket submit(std::unique_ptr<Work> work);
    // Whether a task is over, well or not.
    bool poll(Ticket ticket);
    // Blocks until a task is over, for at most `timeout_s`; nothing if it still runs. Once a task was waited for it is
    // forgotten. Throws std::runtime_error if it failed or was dropped, std::invalid_argument for an unknown ticket.
    std::optional<Span> wait(Ticket ticket, double timeout_s);
    // Finish the task at hand and drop the others.
    void stop();
    // Stop, and wait for the threads.
    void close();

    std::size_t threads() const { return cpus_.size(); }
    const std::vector<int>& cpus() const { return cpus_; }
    bool alive();
    Faults& faults() { return faults_; }

private:
    struct Task;
    struct Result {
        Span span;
        std::string error;  // empty: it went well
    };

    void run(std::size_t thread);
    void work_through(std::size_t thread, const std::shared_ptr<Task>& task);
    void leave(const std::shared_ptr<Task>& task, std::string error, std::unique_lock<std::mutex>& lock);
    void start_next();
    void drop_queue(const std::string& why);

    const std::vector<int> cpus_;
    std::mutex mutex_;
    std::condition_variable wake_;  // threads: there is a task, or none will come
    std::condition_variable done_;  // waiters: a task is over
    std::deque<std::shared_ptr<Task>> queue_;
    std::shared_ptr<Task> current_;
    std::unordered_map<Ticket, Result> results_;
    std::string failure_;
    Ticket last_ = 0;
    std::size_t running_ = 0;  // threads
    bool stopping_ = false;
    Faults faults_;
    std::mutex closing_;
    std::vector<std::thread> threads_;
};

}  // namespace zenflow
