// The little that the tests need of a test framework, and pools for the kernels to run on.
#pragma once

#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"
#include "team.h"

namespace jaxis::testing {

struct Test {
  std::string group;  // the file's name without _test.cc
  std::string name;
  void (*run)();
};

// All that the files define, in no certain order.
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(const char* group, const char* name, void (*run)()) { tests().push_back({group, name, run}); }
};

#define TEST(group, name)                                                                       \
  static void group##_##name();                                                                 \
  static const ::jaxis::testing::Registration group##_##name##_(#group, #name, group##_##name); \
  static void group##_##name()

// Ends the test, with the values of whatever is given behind the condition.
#define CHECK(condition, ...)                                                                                      \
  do {                                                                                                             \
    if (!(condition)) ::jaxis::testing::fail(__FILE__, __LINE__, #condition, ::jaxis::testing::text(__VA_ARGS__)); \
  } while (false)

template <typename... Values>
std::string text(const Values&... values) {
  std::ostringstream out;
  ((out << ' ' << values), ...);
  return out.str();
}

[[noreturn]] inline void fail(const char* file, int line, const char* condition, const std::string& values) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + condition + ":" + values);
}

// |actual - expected| <= relative * |expected| + absolute, for every element; a NaN equals nothing.
inline void check_close(const std::vector<float>& actual, const std::vector<double>& expected, double relative,
                        double absolute) {
  CHECK(actual.size() == expected.size(), actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(actual[i] - expected[i]);
    CHECK(error <= relative * std::abs(expected[i]) + absolute, i, actual[i], expected[i]);
  }
}

inline std::vector<float> normal(size_t size, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> out(size);
  for (float& x : out) x = distribution(generator);
  return out;
}

inline std::vector<int> integers(size_t size, int low, int high, uint32_t seed) {
  std::mt19937 generator(seed);
  std::uniform_int_distribution<int> distribution(low, high);
  std::vector<int> out(size);
  for (int& x : out) x = distribution(generator);
  return out;
}

// Threads that take scheduled tasks from a queue, as XLA's do.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) {
    for (int i = 0; i < num_threads; ++i) {
      threads_.emplace_back([this] { run(); });
    }
  }

  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Pool pool() {
    return {static_cast<int>(threads_.size()),
            [](void* context, void (*task)(void*), void* data) {
              static_cast<ThreadPool*>(context)->schedule([task, data] { task(data); });
            },
            this};
  }

  void schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::function<void()> task = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

// No thread but the caller's.
inline Pool no_pool() {
  return {1, [](void*, void (*)(void*), void*) {}, nullptr};
}

}  // namespace jaxis::testing
