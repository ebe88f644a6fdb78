#include "memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <thread>

#include "pool.hpp"
#include "thread.hpp"

namespace zenflow {
namespace {

constexpr std::size_t kPage = 4096;          // bytes; where pages are larger, some are touched twice
constexpr std::size_t kLargePage = 2 << 20;  // bytes
constexpr std::size_t kShared = 4 << 20;     // bytes

}  // namespace

void FreePages::operator()(std::byte* memory) const noexcept {
    if (getpid() == process) munmap(memory, bytes);
}

Pages map_pages(std::size_t bytes) {
    const std::size_t length = std::max<std::size_t>(bytes, 1);
    void* memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (length >= kLargePage) madvise(memory, length, MADV_HUGEPAGE);  // a dozen streams would miss the TLB
#endif
#if defined(MADV_DONTFORK)
    madvise(memory, length, MADV_DONTFORK);  // where that fails forks are dear, and right all the same
#endif
    return Pages(static_cast<std::byte*>(memory), FreePages{length, getpid()});
}

void touch_pages(std::byte* memory, std::size_t bytes, std::size_t interval_bytes, const std::vector<int>& cpus) {
    const std::size_t interval = std::max<std::size_t>(interval_bytes, 1);
    const auto touch = [=](int cpu, std::size_t threads, std::size_t thread) {
        run_on(cpu);
        for (std::size_t start = 0; start < bytes; start += interval) {
            const Share share = share_of(std::min(interval, bytes - start), threads, thread);
            volatile std::byte* unit = memory + start;
            for (std::size_t at = share.begin; at < share.end; at += kPage) unit[at] = std::byte{0};
        }
    };
    // Threads of its own: those of the pool may have work for seconds. What is small is not worth one for each core.
    const std::size_t threads = bytes < kShared ? 1 : cpus.size();
    std::vector<std::jthread> touching;
    touching.reserve(threads);
    for (std::size_t t = 0; t < threads; ++t) touching.emplace_back(touch, cpus[t], threads, t);
}

}  // namespace zenflow
