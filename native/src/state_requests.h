// What the kernels with a state have in common: a request's part of the step, and rows that do not fill a vector.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "simd.h"
#include "state_slots.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

struct StateRequest {
  int64_t first_row;
  int64_t num_tokens;
  int64_t read;   // slots; -1: none
  int64_t write;  // none without tokens
  int64_t keep;
  int64_t keep_after;

  bool keeps_after(int64_t count) const { return keep >= 0 && count == keep_after; }
};

StateRequest state_request(const StateSlots& slots, int64_t r) {
  const int64_t first = slots.query_start_loc[r];
  return {
      first, slots.query_start_loc[r + 1] - first, slots.read[r], slots.write[r], slots.keep[r], slots.keep_after[r]};
}

int64_t num_rows(const StateSlots& slots) { return slots.query_start_loc[slots.num_requests]; }

// Calls of_row(row) for each of `rows` rows, in tasks that are worth a thread; `size` is how many elements a row has.
template <typename OfRow>
void for_each_state_row(int64_t rows, int64_t size, const Pool& pool, OfRow&& of_row) {
  const int64_t rows_per_task = 1 + 16384 / (size + 1);
  parallel_for(pool, ceil_div(rows, rows_per_task), [&](int64_t task) {
    const int64_t end = min_of((task + 1) * rows_per_task, rows);
    for (int64_t row = task * rows_per_task; row < end; ++row) of_row(row);
  });
}

// Zeros the rows of out [num_rows, size] that are padding.
void zero_padding(const StateSlots& slots, float* out, int64_t rows, int64_t size, const Pool& pool) {
  const int64_t first = num_rows(slots);
  for_each_state_row(rows - first, size, pool, [&](int64_t row) {
    std::memset(out + (first + row) * size, 0, static_cast<size_t>(size) * sizeof(float));
  });
}

// Calls task(index) for each task: on this thread if all of them together are less work than waking others.
template <typename Function>
void run_state_tasks(const Pool& pool, int64_t num_tasks, int64_t elements, Function&& task) {
  constexpr int64_t kSerialElements = 200000;  // of states, each updated once: some ten microseconds
  if (elements < kSerialElements) {
    for (int64_t index = 0; index < num_tasks; ++index) task(index);
  } else {
    parallel_for(pool, num_tasks, [&](int64_t index) { task(index); });
  }
}

}  // namespace
}  // namespace jaxis::JAXIS_ISA
