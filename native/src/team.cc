#include "team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jaxis {
namespace {

constexpr int kMaxWorkers = 256;
// How long a helper without work keeps its thread. The gaps between a step's kernels are a few microseconds.
constexpr auto kSpinTime = std::chrono::microseconds(100);
// How many pauses a caller waits for the last helpers before it offers them its processor. They may have lost theirs,
// where there are more threads than processors.
constexpr int kPausesBeforeYield = 1000;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A worker's own run of neighbouring tasks. Others take from it once theirs are done.
struct alignas(64) TaskRange {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

// There is one team; it is never destroyed, because helpers may outlive main().
struct Team {
  std::atomic<bool> busy{false};             // a kernel is running
  alignas(64) std::atomic<uint64_t> job{0};  // odd while a job is open; each open and each close adds one
  alignas(64) std::atomic<int> inside{0};    // helpers that are, or may be, working on the open job
  alignas(64) std::atomic<int> helpers{0};   // helpers that are alive: spinning or working

  Task task = nullptr;
  void* data = nullptr;
  int num_workers = 0;
  PrefetchHint hint;
  std::atomic<bool> failed{false};  // a task threw
  std::exception_ptr error;         // what it threw; written by the thread that set `failed`
  TaskRange ranges[kMaxWorkers];
  std::atomic<bool> is_taken[kMaxWorkers]{};  // which workers the helpers are
};

Team& team() {
  static Team* instance = new Team;
  return *instance;
}

thread_local void (*end_of_share)() = nullptr;

// Where a thread works on tasks.
struct Share {
  ~Share() {
    if (end_of_share != nullptr) std::exchange(end_of_share, nullptr)();
  }
};

// What a task throws is kept for the caller: it must not leave a helper's thread, nor the caller while helpers work.
void work(Team& t, int worker) noexcept {
  const Share share;
  try {
    for (int i = 0; i < t.num_workers; ++i) {
      int victim = worker + i;
      if (victim >= t.num_workers) victim -= t.num_workers;
      TaskRange& range = t.ranges[victim];
      while (range.next.load(std::memory_order_relaxed) < range.end) {
        const int64_t index = range.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= range.end) break;
        t.task(t.data, index);
      }
    }
  } catch (...) {
    if (!t.failed.exchange(true, std::memory_order_relaxed)) t.error = std::current_exception();
  }
}

// Takes the lowest worker that no helper has taken.
int take_worker(Team& t) {
  for (int worker = 1; worker < kMaxWorkers; ++worker) {
    if (!t.is_taken[worker].exchange(true, std::memory_order_acquire)) return worker;
  }
  return kMaxWorkers;  // of no use to any job
}

void leave_worker(Team& t, int worker) {
  if (worker < kMaxWorkers) t.is_taken[worker].store(false, std::memory_order_release);
}

// Fetches memory until all is there, or a job after `job` is open.
void fetch(const Team& t, uint64_t job, const char* address, int64_t bytes) {
  constexpr int64_t kLine = 64, kAtOnce = 16 * kLine;
  for (int64_t i = 0; i < bytes; i += kAtOnce) {
    if (t.job.load(std::memory_order_relaxed) > job + 1) return;
    for (int64_t j = i; j < i + kAtOnce; j += kLine) __builtin_prefetch(address + j, 0, 2);
  }
}

void help(void*) {
  Team& t = team();
  int worker = take_worker(t);
  uint64_t last_job = 0;
  auto idle_since = std::chrono::steady_clock::now();
  for (unsigned spins = 0;; ++spins) {
    const uint64_t job = t.job.load(std::memory_order_acquire);
    if ((job & 1) != 0 && job != last_job) {
      t.inside.fetch_add(1, std::memory_order_seq_cst);
      const char* hint = nullptr;
      int64_t hint_bytes = 0;
      // Still open now that `helpers` counts this thread: the job cannot be closed before this thread leaves.
      if (t.job.load(std::memory_order_seq_cst) == job && worker < t.num_workers) {
        work(t, worker);
        if (worker < kMaxPrefetchWorkers && t.hint.bytes != 0) {
          hint = static_cast<const char*>(t.hint.address[worker]);
          hint_bytes = t.hint.bytes;
        }
      }
      t.inside.fetch_sub(1, std::memory_order_release);
      fetch(t, job, hint, hint_bytes);
      last_job = job;
      idle_since = std::chrono::steady_clock::now();
      continue;
    }
    pause();
    if ((spins & 63) != 0 || std::chrono::steady_clock::now() - idle_since <= kSpinTime) continue;
    leave_worker(t, worker);
    t.helpers.fetch_sub(1, std::memory_order_seq_cst);
    // A thread that opens a job looks at `helpers` afterwards, so one of the two threads sees the other: a job that
    // counted on this helper finds it still here.
    const uint64_t latest = t.job.load(std::memory_order_seq_cst);
    if ((latest & 1) == 0 || latest == last_job) return;
    t.helpers.fetch_add(1, std::memory_order_relaxed);
    worker = take_worker(t);
    idle_since = std::chrono::steady_clock::now();
  }
}

}  // namespace

void parallel_for(const Pool& pool, int64_t num_tasks, Task task, void* data, const PrefetchHint* hint) {
  Team& t = team();
  int num_workers = pool.num_threads < kMaxWorkers ? pool.num_threads : kMaxWorkers;
  if (num_tasks < num_workers) num_workers = static_cast<int>(num_tasks);
  bool expected = false;
  if (num_workers <= 1 || !t.busy.compare_exchange_strong(expected, true, std::memory_order_acquire)) {
    const Share share;
    for (int64_t i = 0; i < num_tasks; ++i) task(data, i);
    return;
  }

  t.task = task;
  t.data = data;
  t.num_workers = num_workers;
  t.hint.bytes = 0;
  if (hint != nullptr) t.hint = *hint;
  for (int i = 0; i < num_workers; ++i) {
    t.ranges[i].next.store(num_tasks * i / num_workers, std::memory_order_relaxed);
    t.ranges[i].end = num_tasks * (i + 1) / num_workers;
  }
  t.job.fetch_add(1, std::memory_order_seq_cst);  // open
  for (int missing = num_workers - 1 - t.helpers.load(std::memory_order_seq_cst); missing > 0; --missing) {
    t.helpers.fetch_add(1, std::memory_order_relaxed);
    pool.schedule(pool.context, help, nullptr);
  }
  work(t, 0);
  t.job.fetch_add(1, std::memory_order_seq_cst);  // closed
  for (int pauses = 0; t.inside.load(std::memory_order_seq_cst) != 0;) {
    if (pauses < kPausesBeforeYield) {
      ++pauses;
      pause();
    } else {
      std::this_thread::yield();
    }
  }
  std::exception_ptr error;
  if (t.failed.load(std::memory_order_relaxed)) {
    error = std::exchange(t.error, nullptr);
    t.failed.store(false, std::memory_order_relaxed);
  }
  t.busy.store(false, std::memory_order_release);
  if (error) std::rethrow_exception(error);
}

void at_end_of_share(void (*function)()) { end_of_share = function; }

void* scratch(Scratch which, int64_t bytes) {
  struct Buffer {
    void* data = nullptr;
    int64_t size = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffers[static_cast<int>(Scratch::kCount)];
  Buffer& buffer = buffers[static_cast<int>(which)];
  if (buffer.size < bytes) {
    std::free(buffer.data);
    const int64_t size = (bytes + 4095) / 4096 * 4096;
    buffer.size = 0;
    buffer.data = std::aligned_alloc(4096, static_cast<size_t>(size));
    if (buffer.data == nullptr) throw std::bad_alloc();
    buffer.size = size;
  }
  return buffer.data;
}

namespace {

// Median seconds of a kernel beyond its tasks, one for each of so many threads, which run nothing else meanwhile.
double barrier_seconds(int num_threads, int64_t num_jobs) {
  using Clock = std::chrono::steady_clock;
  constexpr auto kTask = std::chrono::microseconds(10);
  const Pool pool{num_threads, [](void*, void (*task)(void*), void* data) { std::thread(task, data).detach(); },
                  nullptr};
  std::vector<double> seconds(num_jobs);
  for (double& job : seconds) {
    const auto begin = Clock::now();
    parallel_for(pool, num_threads, [&](int64_t) {
      for (const auto until = Clock::now() + kTask; Clock::now() < until;) pause();
    });
    job = std::chrono::duration<double>(Clock::now() - begin - kTask).count();
  }
  std::nth_element(seconds.begin(), seconds.begin() + num_jobs / 2, seconds.end());
  return seconds[num_jobs / 2];
}

}  // namespace
}  // namespace jaxis

extern "C" __attribute__((visibility("default"))) double jaxis_barrier_seconds(int32_t num_threads, int64_t num_jobs) {
  return jaxis::barrier_seconds(num_threads, num_jobs);
}

// Kernels so far that more than one thread could share.
extern "C" __attribute__((visibility("default"))) int64_t jaxis_num_barriers() {
  return static_cast<int64_t>(jaxis::team().job.load() / 2);
}
