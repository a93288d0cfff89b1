// Mamba's selective scan: a task is a strip of channels, over all of a request's tokens.
//
// A vector is one element of the state of sixteen channels, so that no sum is across lanes. The state of these channels
// stays in the first cache over all tokens, with the rates of its decays.
#include "selective_scan.h"

#include <cstdint>
#include <cstring>

#include "arithmetic.h"
#include "simd.h"
#include "state_requests.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

constexpr int64_t kScanStripChannels = 4 * kLanes;

// Sixteen channels of one request, or fewer.
class ScanLanes {
 public:
  ScanLanes(const SelectiveScan& s, const StateRequest& request, int64_t first)
      : s_(s), request_(request), first_(first), count_(min_of(s.num_channels - first, kLanes)) {
    const int64_t elements = s.state_size * kLanes;
    rates_ = static_cast<float*>(scratch(Scratch::kStrip, 2 * elements * static_cast<int64_t>(sizeof(float))));
    state_ = rates_ + elements;
    for (int64_t n = 0; n < s.state_size; ++n) {
      for (int64_t i = 0; i < kLanes; ++i) {
        rates_[n * kLanes + i] = i < count_ ? s.a[(first + i) * s.state_size + n] : 0.0f;
      }
      store(state_ + n * kLanes, request.read < 0 ? zero() : load_part(element(request.read, n), count_));
    }
  }

  void run() const {
    for (int64_t count = 1; count <= request_.num_tokens; ++count) {
      token(request_.first_row + count - 1);
      if (request_.keeps_after(count)) write(request_.keep);
    }
    if (request_.write >= 0) write(request_.write);
  }

 private:
  void token(int64_t row) const {
    const int64_t at = row * s_.num_channels + first_, size = s_.state_size;
    const F32x16 x = load_part(s_.x + at, count_), dt = load_part(s_.dt + at, count_), input = dt * x;
    const float* b = s_.b + row * size;
    const float* c = s_.c + row * size;
    F32x16 sum = load_part(s_.d + first_, count_) * x;
    for (int64_t n = 0; n < size; ++n) {
      const F32x16 decay = exp(dt * load(rates_ + n * kLanes));
      const F32x16 updated = fma(input, broadcast(b[n]), decay * load(state_ + n * kLanes));
      store(state_ + n * kLanes, updated);
      sum = fma(updated, broadcast(c[n]), sum);
    }
    store_part(s_.y + at, sum, count_);
  }

  void write(int64_t slot) const {
    for (int64_t n = 0; n < s_.state_size; ++n) store_part(element(slot, n), load(state_ + n * kLanes), count_);
  }

  float* element(int64_t slot, int64_t n) const {
    return s_.state + (slot * s_.state_size + n) * s_.num_channels + first_;
  }

  const SelectiveScan& s_;
  const StateRequest& request_;
  int64_t first_;
  int64_t count_;
  float* rates_;  // [N, 16]
  float* state_;  // [N, 16]
};

}  // namespace

void selective_scan(const SelectiveScan& s, const Pool& pool) {
  zero_padding(s.slots, s.y, s.num_tokens, s.num_channels, pool);
  const int64_t strips = ceil_div(s.num_channels, kScanStripChannels);
  const int64_t elements = num_rows(s.slots) * s.num_channels * s.state_size;
  run_state_tasks(pool, s.slots.num_requests * strips, elements, [&](int64_t task) {
    const StateRequest request = state_request(s.slots, task / strips);
    if (request.num_tokens == 0) return;
    const int64_t first = task % strips * kScanStripChannels;
    const int64_t end = min_of(first + kScanStripChannels, s.num_channels);
    for (int64_t channel = first; channel < end; channel += kLanes) ScanLanes(s, request, channel).run();
  });
}

}  // namespace jaxis::JAXIS_ISA
