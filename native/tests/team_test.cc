#include <atomic>
#include <chrono>
#include <stdexcept>

#if defined(__linux__)
#include <sched.h>
#endif

#include "testing.h"

using namespace jaxis;
using namespace jaxis::testing;

namespace {

// Each index is seen once, and what tasks wrote is there when parallel_for returns.
void check_job(const Pool& pool, int64_t num_tasks) {
  std::vector<int> seen(num_tasks, 0);
  parallel_for(pool, num_tasks, [&](int64_t i) { ++seen[i]; });
  for (int64_t i = 0; i < num_tasks; ++i) CHECK(seen[i] == 1, i, seen[i], num_tasks);
}

// A pool that does nothing with what it is given until told to.
class LatePool {
 public:
  explicit LatePool(int num_threads) : num_threads_(num_threads) {}

  Pool pool() {
    return {num_threads_,
            [](void* context, void (*task)(void*), void* data) {
              static_cast<LatePool*>(context)->tasks_.push_back([task, data] { task(data); });
            },
            this};
  }

  size_t num_waiting() const { return tasks_.size(); }

  // Each on a thread of its own, while `meanwhile` runs here.
  void start(const std::function<void()>& meanwhile) {
    std::vector<std::thread> threads;
    for (const std::function<void()>& task : tasks_) threads.emplace_back(task);
    tasks_.clear();
    meanwhile();
    for (std::thread& thread : threads) thread.join();
  }

 private:
  const int num_threads_;
  std::vector<std::function<void()>> tasks_;
};

}  // namespace

TEST(team, runs_each_task_once) {
  for (const int num_threads : {1, 2, 3, 4, 8}) {
    ThreadPool threads(num_threads);
    for (const int64_t num_tasks : {0, 1, 2, 3, 4, 5, 7, 64, 1000, 10007}) check_job(threads.pool(), num_tasks);
  }
}

// Each thread that worked calls it once, after its last task, and one that did not ask for it does not.
TEST(team, what_ends_a_share_follows_its_tasks) {
  static std::atomic<int> ended, begun;
  static thread_local bool is_at_work;
  for (const int num_threads : {1, 4}) {
    ThreadPool threads(num_threads);
    for (int i = 0; i < 100; ++i) {
      ended = begun = 0;
      parallel_for(threads.pool(), 50, [](int64_t) {
        if (is_at_work) return;
        is_at_work = true;
        ++begun;
        at_end_of_share([] {
          is_at_work = false;
          ++ended;
        });
      });
      CHECK(ended == begun && begun >= 1 && begun <= num_threads, ended, begun, num_threads);
      parallel_for(threads.pool(), 50, [](int64_t) {});
      CHECK(ended == begun, ended, begun);
    }
  }
}

TEST(team, what_ends_a_share_follows_a_task_that_throws) {
  static int ended;
  ended = 0;
  try {
    parallel_for(no_pool(), 2, [](int64_t) {
      at_end_of_share([] { ++ended; });
      throw std::runtime_error("");
    });
  } catch (const std::runtime_error&) {
  }
  CHECK(ended == 1, ended);
}

TEST(team, helpers_take_part) {
  ThreadPool threads(4);
  std::atomic<int> arrived{0};
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  // No task ends before two have begun, so one thread alone would not come through.
  parallel_for(threads.pool(), 2, [&](int64_t) {
    ++arrived;
    while (arrived < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  });
  CHECK(std::chrono::steady_clock::now() < deadline);
}

TEST(team, a_pool_that_starts_nothing_costs_no_progress) {
  LatePool pool(4);
  for (int job = 0; job < 100; ++job) check_job(pool.pool(), 50);
  CHECK(pool.num_waiting() <= 3, pool.num_waiting());  // asked for three, and did not ask again
  pool.start([] {});                                   // too late, for jobs that are done
  check_job(pool.pool(), 50);
  pool.start([] {});
}

TEST(team, helpers_that_start_late_join_the_job_that_is_open) {
  LatePool pool(4);
  check_job(pool.pool(), 50);
  pool.start([&] {
    for (int job = 0; job < 2000; ++job) check_job(pool.pool(), 7);
  });
  pool.start([] {});
}

TEST(team, nested_calls_run_where_they_are) {
  ThreadPool threads(4);
  const Pool pool = threads.pool();
  std::vector<int> seen(20 * 30, 0);
  parallel_for(pool, 20, [&](int64_t i) {
    const std::thread::id self = std::this_thread::get_id();
    parallel_for(pool, 30, [&](int64_t j) {
      CHECK(std::this_thread::get_id() == self);
      ++seen[i * 30 + j];
    });
  });
  for (const int count : seen) CHECK(count == 1, count);
}

TEST(team, concurrent_callers_do_not_disturb_each_other) {
  ThreadPool threads(4);
  const Pool pool = threads.pool();
  std::atomic<int> failures{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&, caller] {
      try {
        for (int job = 0; job < 500; ++job) check_job(pool, 1 + (job * 7 + caller) % 40);
      } catch (const std::exception&) {
        ++failures;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(failures == 0, failures.load());
}

TEST(team, thousands_of_tiny_jobs) {
  ThreadPool threads(4);
  for (int job = 0; job < 20000; ++job) check_job(threads.pool(), 2 + job % 5);
}

TEST(team, jobs_as_far_apart_as_helpers_wait) {
  ThreadPool threads(4);
  // Around the time after which a helper goes home, so that many leave just when a job opens.
  for (int job = 0; job < 2000; ++job) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(95000 + job * 10);
    check_job(threads.pool(), 4);
    while (std::chrono::steady_clock::now() < until) {
    }
  }
}

TEST(team, more_threads_than_processors) {
  ThreadPool threads(32);
  for (int job = 0; job < 300; ++job) check_job(threads.pool(), 100);
}

#if defined(__linux__)
TEST(team, threads_that_share_one_processor) {
  cpu_set_t before;
  CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &before)) {
      CPU_SET(cpu, &one);
      break;
    }
  }
  CHECK(sched_setaffinity(0, sizeof one, &one) == 0);  // the pool's threads inherit it
  {
    ThreadPool threads(4);
    for (int job = 0; job < 300; ++job) check_job(threads.pool(), 20);
  }
  CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
}
#endif

TEST(team, what_a_task_throws_reaches_the_caller) {
  ThreadPool threads(4);
  for (int job = 0; job < 300; ++job) {
    std::atomic<int> running{0};
    bool caught = false;
    try {
      parallel_for(threads.pool(), 64, [&](int64_t i) {
        ++running;
        const bool bad = i % 16 == job % 16;
        --running;
        if (bad) throw std::bad_alloc();
      });
    } catch (const std::bad_alloc&) {
      caught = true;
    }
    CHECK(caught);
    CHECK(running == 0, running.load());  // no thread runs a task any more
    check_job(threads.pool(), 64);        // and the team is as good as new
  }
}

TEST(team, scratch_memory_is_the_threads_own) {
  ThreadPool threads(4);
  std::atomic<int> wrong{0};
  parallel_for(threads.pool(), 200, [&](int64_t i) {
    const int64_t bytes = 1 + i * 37;
    for (const Scratch buffer : {Scratch::kRows, Scratch::kPanel}) {
      auto* memory = static_cast<unsigned char*>(scratch(buffer, bytes));
      if (reinterpret_cast<uintptr_t>(memory) % 64 != 0) ++wrong;
      for (int64_t k = 0; k < bytes; ++k) memory[k] = static_cast<unsigned char>(i + static_cast<int>(buffer));
    }
    const auto* first = static_cast<unsigned char*>(scratch(Scratch::kRows, 1));  // smaller: the same memory still
    for (int64_t k = 0; k < bytes; ++k) wrong += first[k] != static_cast<unsigned char>(i);
  });
  CHECK(wrong == 0, wrong.load());
}
