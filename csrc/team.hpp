// The calling thread and helpers beside it share a loop: the threads that a device which is the CPU itself has.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

namespace zenflow {

// One for each process, as the cores are there once. Helpers are started when they are first asked for, and sleep
// between loops. Every method may be called from any thread; who comes while another's loop runs works alone.
class Team {
public:
    // In a forked child a new one: it has none of its parent's threads, and their locks may be held for ever.
    static Team& of_process();

    // Calls work(piece) once for every piece, on the calling thread and at most `threads` - 1 helpers; returns when all
    // of it is done. Where no helper comes, the caller does everything: it waits only for pieces that were begun.
    // `work` must not throw. All of it runs in the default rounding mode, which is the caller's only for that time.
    template <class Work>
    void run(std::size_t threads, std::size_t pieces, const Work& work) {
        Job job{[](const void* what, std::size_t piece) { (*static_cast<const Work*>(what))(piece); }, &work, pieces};
        share(threads, job);
    }

    // Ends the helpers and waits for them; loops that come later have none.
    void end();

private:
    struct Job {
        void (*call)(const void* work, std::size_t piece);
        const void* work;
        std::size_t pieces;
        std::atomic<std::size_t> next{0};

        void do_pieces() {
            for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) call(work, i);
        }
    };

    Team();
    void share(std::size_t threads, Job& job);
    void grow(std::size_t helpers);
    void help();

    const long process_;
    std::mutex callers_;  // held by the thread whose loop it is
    std::mutex mutex_;    // guards what follows
    std::condition_variable wake_;
    std::condition_variable done_;
    std::vector<std::thread> helpers_;
    Job* job_ = nullptr;
    std::size_t places_ = 0;  // helpers that may still join the job
    std::size_t inside_ = 0;  // helpers that have
    bool ended_ = false;
};

}  // namespace zenflow
