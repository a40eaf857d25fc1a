// A small pool of threads that sleep between updates; the calling thread works along.
#pragma once

#include <functional>

namespace hpcpipe {

// Threads that take part in `parallel`, the caller included; at least 1.
void set_threads(int count);
int get_threads();

// Run task(part) for part = 0..parts-1 on the pool and return when all are done. Tasks must not throw. Parts are handed
// out one after another, so that a thread on a busy core takes fewer. Calls from several threads take turns.
void parallel(int parts, const std::function<void(int)>& task);

}  // namespace hpcpipe
