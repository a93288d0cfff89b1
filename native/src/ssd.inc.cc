// Mamba2's recurrence: a task is a strip of rows of one head's state, over all of a request's tokens.
//
// The strip stays in the cache, in the slot that it is written to. For each token it is read and written once.
#include "ssd.h"

#include <cstdint>
#include <cstring>

#include "arithmetic.h"
#include "simd.h"
#include "state_requests.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

constexpr int64_t kSsdStripRows = 16;
constexpr int kSsdRowsAtOnce = 4;  // each addition to a sum waits for the one before it

// exp(dt * a) for each token and head [T, H].
float* ssd_decays(const Ssd& s, const Pool& pool) {
  const int64_t rows = num_rows(s.slots), heads = s.num_heads;
  auto* decays = static_cast<float*>(scratch(Scratch::kDecays, rows * heads * static_cast<int64_t>(sizeof(float))));
  for_each_state_row(rows, heads, pool, [&](int64_t row) {
    for (int64_t h = 0; h < heads; h += kLanes) {
      const F32x16 logs = load_part(s.dt + row * heads + h, heads - h) * load_part(s.a + h, heads - h);
      store_part(decays + row * heads + h, exp(logs), heads - h);
    }
  });
  return decays;
}

// What a token does to kRows rows of a head's state [kRows, state_size], from `before` to `after`, which may be the
// same.
template <int kRows>
JAXIS_INLINE void ssd_token_rows(const float* before, float* after, int64_t size, const float* b, const float* c,
                                 float decay, float dt, float d, const float* x, float* y) {
  const F32x16 decays = broadcast(decay);
  F32x16 inputs[kRows], sums[kRows];
  for (int p = 0; p < kRows; ++p) {
    inputs[p] = broadcast(dt * x[p]);
    sums[p] = zero();
  }
  const auto add = [&](int64_t n, auto load_vector, auto store_vector) {
    const F32x16 keys = load_vector(b + n), queries = load_vector(c + n);
    for (int p = 0; p < kRows; ++p) {
      const F32x16 updated = fma(inputs[p], keys, decays * load_vector(before + p * size + n));
      store_vector(after + p * size + n, updated);
      sums[p] = fma(updated, queries, sums[p]);
    }
  };
  int64_t n = 0;
  for (; n + kLanes <= size; n += kLanes) {
    add(n, [](const float* at) { return load(at); }, [](float* at, F32x16 value) { store(at, value); });
  }
  if (n < size) {
    add(
        n, [&](const float* at) { return load_part(at, size - n); },
        [&](float* at, F32x16 value) { store_part(at, value, size - n); });
  }
  for (int p = 0; p < kRows; ++p) y[p] = reduce_add(sums[p]) + d * x[p];
}

void run_ssd_strip(const Ssd& s, const float* decays, const StateRequest& request, int64_t head, int64_t first) {
  const int64_t rows = min_of(s.head_dim - first, kSsdStripRows), size = s.state_size;
  const int64_t bytes = rows * size * static_cast<int64_t>(sizeof(float));
  const int64_t group = head / (s.num_heads / s.num_groups);
  const auto strip_in = [&](int64_t slot) {
    return s.state + ((slot * s.num_heads + head) * s.head_dim + first) * size;
  };
  float* strip = request.write >= 0 ? strip_in(request.write) : static_cast<float*>(scratch(Scratch::kStrip, bytes));
  const float* before = strip;
  if (request.read >= 0) {
    before = strip_in(request.read);
  } else {
    std::memset(strip, 0, static_cast<size_t>(bytes));
  }
  const float d = s.d == nullptr ? 0.0f : s.d[head];
  for (int64_t count = 1; count <= request.num_tokens; ++count, before = strip) {
    const int64_t row = request.first_row + count - 1, of_head = row * s.num_heads + head;
    const float* b = s.b + (row * s.num_groups + group) * size;
    const float* c = s.c + (row * s.num_groups + group) * size;
    const float* x = s.x + of_head * s.head_dim + first;
    float* y = s.y + of_head * s.head_dim + first;
    for (int64_t p = 0; p < rows; p += kSsdRowsAtOnce) {
      with_count<kSsdRowsAtOnce>(static_cast<int>(min_of(rows - p, kSsdRowsAtOnce)), [&](auto at_once) {
        ssd_token_rows<at_once>(before + p * size, strip + p * size, size, b, c, decays[of_head], s.dt[of_head], d,
                                x + p, y + p);
      });
    }
    if (request.keeps_after(count)) std::memcpy(strip_in(request.keep), strip, static_cast<size_t>(bytes));
  }
}

}  // namespace

void ssd(const Ssd& s, const Pool& pool) {
  zero_padding(s.slots, s.y, s.num_tokens, s.num_heads * s.head_dim, pool);
  const float* decays = ssd_decays(s, pool);
  const int64_t strips = ceil_div(s.head_dim, kSsdStripRows), per_request = s.num_heads * strips;
  const int64_t elements = num_rows(s.slots) * s.num_heads * s.head_dim * s.state_size;
  run_state_tasks(pool, s.slots.num_requests * per_request, elements, [&](int64_t task) {
    const StateRequest request = state_request(s.slots, task / per_request);
    if (request.num_tokens == 0) return;
    run_ssd_strip(s, decays, request, task % per_request / strips, task % strips * kSsdStripRows);
  });
}

}  // namespace jaxis::JAXIS_ISA
