#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace hpcpipe {
namespace {

class Pool {
 public:
  explicit Pool(int threads) : wanted_(threads) {}

  void set_threads(int count) { wanted_.store(count < 1 ? 1 : count); }
  int get_threads() const { return wanted_.load(); }

  void parallel(int parts, const std::function<void(int)>& task) {
    std::lock_guard<std::mutex> turn(turn_);
    const int threads = wanted_.load();
    const int helpers = (parts < threads ? parts : threads) - 1;
    if (helpers > 0) grow(helpers);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = &task;
      parts_ = parts;
      next_.store(0);
      open_ = helpers;
      working_ = 0;
    }
    if (helpers > 0) wake_.notify_all();
    work(task, parts);
    std::unique_lock<std::mutex> lock(mutex_);
    // A helper that has not started by now has nothing left to do.
    open_ = 0;
    done_.wait(lock, [this] { return working_ == 0; });
  }

 private:
  void work(const std::function<void(int)>& task, int parts) {
    for (int part = next_.fetch_add(1); part < parts; part = next_.fetch_add(1)) task(part);
  }

  void grow(int helpers) {
    for (; started_ < helpers; ++started_) std::thread([this] { serve(); }).detach();
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return open_ > 0; });
      --open_;
      ++working_;
      const std::function<void(int)>& task = *task_;
      const int parts = parts_;
      lock.unlock();
      work(task, parts);
      lock.lock();
      if (--working_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_;
  std::atomic<int> wanted_;
  int started_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(int)>* task_ = nullptr;
  int parts_ = 0;
  int open_ = 0;
  int working_ = 0;
  std::atomic<int> next_{0};
};

std::atomic<Pool*> instance{nullptr};

// Never destroyed: the detached threads may outlive static destruction at exit. A forked child has none of its parent's
// threads and may have inherited a locked mutex, so it gets a pool of its own.
Pool& pool() {
  static const bool created = [] {
    instance.store(new Pool(1));
    pthread_atfork(nullptr, nullptr, [] { instance.store(new Pool(instance.load()->get_threads())); });
    return true;
  }();
  (void)created;
  return *instance.load();
}

}  // namespace

void set_threads(int count) { pool().set_threads(count); }
int get_threads() { return pool().get_threads(); }
void parallel(int parts, const std::function<void(int)>& task) { pool().parallel(parts, task); }

}  // namespace hpcpipe
