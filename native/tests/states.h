// Steps of requests with states, for the tests of the kernels that have one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "state_slots.h"
#include "testing.h"

namespace jaxis::testing {

// A step of requests: their tokens, and their slots.
struct StateStep {
  std::vector<int32_t> read, write, keep, keep_after, starts{0};

  // Adds a request.
  void add(int tokens, int read_slot, int write_slot, int keep_slot = -1, int after = 0) {
    read.push_back(read_slot);
    write.push_back(write_slot);
    keep.push_back(keep_slot);
    keep_after.push_back(after);
    starts.push_back(starts.back() + tokens);
  }

  StateSlots slots() const {
    return {read.data(),       write.data(),  keep.data(),
            keep_after.data(), starts.data(), static_cast<int64_t>(read.size())};
  }
  int64_t rows() const { return starts.back(); }
};

// A mix: beginnings, decodes, a slot that two read, chunks of which a state is kept in the middle and at the end, an
// empty request, and one in place. No request uses slots 7 and 9.
inline StateStep mixed_step() {
  StateStep step;
  step.add(1, 0, 0);
  step.add(5, -1, 1);
  step.add(1, 2, 3, 4, 1);
  step.add(7, 2, 5, 6, 3);
  step.add(0, 9, 7);
  step.add(2, -1, 8, 10, 2);
  return step;
}
constexpr int kMixedSlots = 11;
constexpr int kPaddingRows = 3;

// Calls token(row, state) for each token in turn, where state [size] is the request's in double precision before it and
// becomes that after it; returns what the slots hold then.
template <typename Token>
std::vector<double> run_tokens(const StateStep& step, const std::vector<float>& slots, int64_t size, Token&& token) {
  std::vector<double> after(slots.begin(), slots.end());
  const auto store = [&](int slot, const std::vector<double>& state) {
    if (slot >= 0) std::copy(state.begin(), state.end(), after.begin() + slot * size);
  };
  for (size_t r = 0; r < step.read.size(); ++r) {
    const int64_t first = step.starts[r], tokens = step.starts[r + 1] - first;
    if (tokens == 0) continue;
    std::vector<double> state(size, 0.0);
    if (step.read[r] >= 0) {
      const auto begin = slots.begin() + step.read[r] * size;
      std::copy(begin, begin + size, state.begin());
    }
    for (int64_t count = 1; count <= tokens; ++count) {
      token(first + count - 1, state);
      if (count == step.keep_after[r]) store(step.keep[r], state);
    }
    store(step.write[r], state);
  }
  return after;
}

// The two checks below are of a kernel with a state, and of a class of its inputs, constructed from sizes and a number
// of rows:
//   arguments(first_row, rows, state, out, step)  what the kernel gets to compute these rows;
//   state_size(), out_size()                      elements of a slot, and of an output row;
//   token(row, state, out)                        the formula, for one token;
//   spoil(first_row)                              makes rows from here NaN, as those of padding may be.

// Throws unless outputs and states are the formula's, within these absolute tolerances, after a mixed step; and what
// no request writes to is as it was.
template <typename Inputs, typename Sizes, typename Kernel>
void check_formula(const Sizes& sizes, Kernel&& kernel, double out_tolerance, double state_tolerance) {
  ThreadPool threads(3);
  const StateStep step = mixed_step();
  const int64_t rows = step.rows() + kPaddingRows;
  Inputs inputs(sizes, rows);
  inputs.spoil(step.rows());
  const int64_t state_size = inputs.state_size();
  std::vector<float> state = normal(kMixedSlots * state_size, 7), out(rows * inputs.out_size(), 1.0f);
  std::vector<double> expected(out.size(), 0.0);
  const std::vector<double> after = run_tokens(
      step, state, state_size, [&](int64_t row, auto& of_request) { inputs.token(row, of_request, expected); });
  const std::vector<float> before = state;
  kernel(inputs.arguments(0, rows, state, out.data(), step), threads.pool());
  check_close(out, expected, 1e-4, out_tolerance);
  check_close(state, after, 1e-4, state_tolerance);
  for (const int unused : {2, 7, 9}) {
    const auto at = before.begin() + unused * state_size;
    CHECK(std::equal(at, at + state_size, state.begin() + unused * state_size), unused);
  }
}

// Throws unless a request's outputs and states are bit-identical whatever chunks it is computed in, from a kept state
// too, on one thread or several, and whether or not a slot keeps its state.
template <typename Inputs, typename Sizes, typename Kernel>
void check_independence(const Sizes& sizes, Kernel&& kernel) {
  ThreadPool threads(4);
  constexpr int kTokens = 37, kKept = 11;
  const Inputs inputs(sizes, kTokens);
  const int64_t state_size = inputs.state_size(), out_size = inputs.out_size();
  StateStep whole;
  whole.add(kTokens, -1, 0, 1, kKept);
  std::vector<float> expected(kTokens * out_size), state(2 * state_size);
  kernel(inputs.arguments(0, kTokens, state, expected.data(), whole), no_pool());
  for (const int chunk : {1, 2, 5, 7, 36}) {
    for (const int first_row : {0, kKept}) {
      // Slot 2, which the request writes to, has another's state before.
      std::vector<float> slots = normal(3 * state_size, 8), out(expected.size());
      std::copy(state.begin(), state.end(), slots.begin());
      for (int row = first_row; row < kTokens; row += chunk) {
        const int size = std::min(chunk, kTokens - row);
        StateStep step;
        step.add(size, row == 0 ? -1 : (row == first_row ? 1 : 2), 2);
        kernel(inputs.arguments(row, size, slots, out.data() + row * out_size, step), threads.pool());
      }
      CHECK(std::equal(out.begin() + first_row * out_size, out.end(), expected.begin() + first_row * out_size), chunk,
            first_row);
      CHECK(std::equal(state.begin(), state.begin() + state_size, slots.begin() + 2 * state_size), chunk, first_row);
    }
  }
  StateStep unsaved;
  unsaved.add(kTokens, -1, -1);
  std::vector<float> out(expected.size()), none(1);
  kernel(inputs.arguments(0, kTokens, none, out.data(), unsaved), threads.pool());
  CHECK(out == expected);
}

}  // namespace jaxis::testing
