#include "pool.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <utility>

#include "thread.hpp"

#if defined(__unix__)
#include <unistd.h>
#endif

namespace zenflow {
namespace {

constexpr const char* kClosed = "the host engine was closed";
constexpr const char* kDied = "a thread of the host engine is gone";

double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string what(const std::exception_ptr& error) {
    try {
        std::rethrow_exception(error);
    } catch (const ThreadDied&) {
        return kDied;
    } catch (const std::exception& known) {
        return known.what();
    } catch (...) {
        return "an unknown exception";
    }
}

}  // namespace

Share share_of(std::size_t size, std::size_t threads, std::size_t thread) {
    const std::size_t lines = (size + kShareUnits - 1) / kShareUnits;
    const auto edge = [&](std::size_t t) {
        return std::min(size, (lines / threads * t + std::min(t, lines % threads)) * kShareUnits);
    };
    return {edge(thread), edge(thread + 1)};
}

struct Pool::Task {
    struct alignas(64) Lane {
        std::atomic<std::size_t> next;
        std::size_t end;
    };

    Task(Ticket number, std::unique_ptr<Work> what_to_do, std::size_t threads)
        : ticket(number), work(std::move(what_to_do)), lanes(threads) {
        for (std::size_t t = 0; t < threads; ++t) {
            const Share share = share_of(work->size(), threads, t);
            lanes[t].next = share.begin;
            lanes[t].end = share.end;
        }
    }

    const Ticket ticket;
    std::unique_ptr<Work> work;
    std::vector<Lane> lanes;  // of each thread; one that is through with its own takes from the others
    std::atomic<bool> failed{false};
    // Guarded by the pool's mutex:
    std::size_t inside = 0;  // threads that work on it
    bool claimed = false;    // nothing is left to take
    std::string error;
    double begin_s = 0.0;
};

Pool::Pool(const std::vector<int>& cpus) : cpus_(cpus) {
    if (cpus_.empty()) throw std::invalid_argument("cpus must not be empty");
    running_ = cpus_.size();
    threads_.reserve(cpus_.size());
    try {
        for (std::size_t t = 0; t < cpus_.size(); ++t) threads_.emplace_back(&Pool::run, this, t);
    } catch (...) {
        {
            const std::lock_guard lock(mutex_);
            running_ = threads_.size();
        }
        close();
        throw;
    }
}

Pool::~Pool() {
    close();
}

Pool::Ticket Pool::submit(std::unique_ptr<Work> work) {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw std::runtime_error(failure_);
    if (stopping_) throw std::runtime_error(kClosed);
    queue_.push_back(std::make_shared<Task>(last_ + 1, std::move(work), threads()));
    ++last_;
    if (!current_) start_next();
    return last_;
}

bool Pool::poll(Ticket ticket) {
    const std::lock_guard lock(mutex_);
    return results_.contains(ticket);
}

std::optional<Span> Pool::wait(Ticket ticket, double timeout_s) {
    std::unique_lock lock(mutex_);
    const auto pending = [&] {
        const auto is_it = [&](const auto& task) { return task->ticket == ticket; };
        return (current_ && is_it(current_)) || std::any_of(queue_.begin(), queue_.end(), is_it);
    };
    if (!results_.contains(ticket) && !pending()) throw std::invalid_argument("no task has this ticket");
    done_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return results_.contains(ticket); });
    const auto found = results_.extract(ticket);
    if (found.empty()) return std::nullopt;
    if (!found.mapped().error.empty()) throw std::runtime_error(found.mapped().error);
    return found.mapped().span;
}

void Pool::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        drop_queue(kClosed);
    }
    faults_.release();
    wake_.notify_all();
    done_.notify_all();
}

void Pool::close() {
    stop();
    const std::lock_guard closing(closing_);
    for (auto& thread : threads_) {
        if (thread.joinable()) thread.join();
    }
}

bool Pool::alive() {
    const std::lock_guard lock(mutex_);
    return running_ == threads() && !stopping_;
}

void Pool::run(std::size_t thread) {
    run_on(cpus_[thread]);
    name_thread("zenflow-engine");
    use_default_rounding();
    Ticket seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] {
            return (current_ && !current_->claimed && current_->ticket != seen) || (stopping_ && !current_);
        });
        if (!current_) break;
        const std::shared_ptr<Task> task = current_;
        seen = task->ticket;
        ++task->inside;
        lock.unlock();
        std::exception_ptr error;
        try {
            work_through(thread, task);
        } catch (...) {
            error = std::current_exception();
            task->failed = true;  // the others take no more of it
            faults_.release();
        }
        lock.lock();
        const std::string message = error ? what(error) : std::string();
        leave(task, message, lock);
        if (message == kDied) break;
    }
    --running_;
}

// Takes pieces until none are left: its own share first, then what the others have not taken.
void Pool::work_through(std::size_t thread, const std::shared_ptr<Task>& task) {
    const std::size_t grain = task->work->grain();
    for (std::size_t i = 0; i < threads(); ++i) {
        Task::Lane& lane = task->lanes[(thread + i) % threads()];
        while (!task->failed.load(std::memory_order_relaxed)) {
            const std::size_t begin = lane.next.fetch_add(grain);
            if (begin >= lane.end) break;
            faults_.before_piece();
            task->work->run(begin, std::min(begin + grain, lane.end));
        }
    }
}

// The last thread to leave a task finishes it and starts the next.
void Pool::leave(const std::shared_ptr<Task>& task, std::string error, std::unique_lock<std::mutex>& lock) {
    task->claimed = true;
    if (task->error.empty()) task->error = std::move(error);
    if (--task->inside > 0) return;
    if (task->error.empty()) {
        lock.unlock();  // nobody else is inside, and nobody can enter
        std::string failed;
        try {
            task->work->finish();
        } catch (...) {
            failed = what(std::current_exception());
        }
        lock.lock();
        task->error = failed;
    }
    task->work.reset();
    results_[task->ticket] = {{task->begin_s, now_s()}, task->error};
    current_.reset();
    if (!task->error.empty()) {
        failure_ = task->error;
        drop_queue(failure_);
    }
    if (!stopping_) start_next();
    if (!current_) wake_.notify_all();
    done_.notify_all();
}

void Pool::start_next() {
    if (queue_.empty()) return;
    current_ = std::move(queue_.front());
    queue_.pop_front();
    current_->begin_s = now_s();
    wake_.notify_all();
}

void Pool::drop_queue(const std::string& why) {
    for (const auto& task : queue_) results_[task->ticket] = {{}, why};
    queue_.clear();
    done_.notify_all();
}

}  // namespace zenflow
