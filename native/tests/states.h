// Steps of requests with states, for the tests of the kernels that have one.
#pragma once

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
// empty request, and one in place. Slots 7 and 9 are in nobody's use.
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

}  // namespace jaxis::testing
