// Host memory in whole pages, touched first on the cores that will work on it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace zenflow {

// Nothing in a forked child: it has none of these pages, and perhaps something else where they would be.
struct FreePages {
    std::size_t bytes = 0;
    long process = 0;  // that mapped them
    void operator()(std::byte* memory) const noexcept;
};
using Pages = std::unique_ptr<std::byte[], FreePages>;

// Zeroed pages, in large ones where the system has them. Nothing is resident yet. A forked child has none of them: it
// would cost its parent a copy of every page that is written, and split the large ones. Throws std::bad_alloc.
Pages map_pages(std::size_t bytes);

// Makes pages resident near the cores of a pool's threads (-1: any). The memory is cut into intervals (the last may be
// shorter), and each is shared out as the update of an interval is. Throws std::system_error.
void touch_pages(std::byte* memory, std::size_t bytes, std::size_t interval_bytes, const std::vector<int>& cpus);

}  // namespace zenflow
