// Rotary position embedding.
#include "rope.h"

#include <cstdint>

#include "norm.h"
#include "norm_row.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

void rotate_half_split(const float* x, const float* cos, const float* sin, int64_t pairs, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    const F32x16 first = load(x + i), second = load(x + pairs + i), c = load(cos + i), s = load(sin + i);
    store(out + i, first * c - second * s);
    store(out + pairs + i, second * c + first * s);
  }
  for (; i < pairs; ++i) {
    const float first = x[i], second = x[pairs + i];
    out[i] = first * cos[i] - second * sin[i];
    out[pairs + i] = second * cos[i] + first * sin[i];
  }
}

void rotate_interleaved(const float* x, const float* cos, const float* sin, int64_t pairs, float* out) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float first = x[2 * i], second = x[2 * i + 1];
    out[2 * i] = first * cos[i] - second * sin[i];
    out[2 * i + 1] = second * cos[i] + first * sin[i];
  }
}

void apply_rope(const RotaryEmbedding& a, int64_t token, const float* x, const float* norm, int64_t heads, float* out) {
  const float* cos = a.cos + token * a.pairs;
  const float* sin = a.sin + token * a.pairs;
  for (int64_t row = token * heads; row < (token + 1) * heads; ++row) {
    const float* head = x + row * a.head_dim;
    float* head_out = out + row * a.head_dim;
    if (norm != nullptr) {
      norm_row({head, norm, head_out, 1, a.head_dim, a.epsilon}, 0);
      head = head_out;
    }
    if (a.interleaved) {
      rotate_interleaved(head, cos, sin, a.pairs, head_out);
    } else {
      rotate_half_split(head, cos, sin, a.pairs, head_out);
    }
    if (head != head_out) {
      for (int64_t i = 2 * a.pairs; i < a.head_dim; ++i) head_out[i] = head[i];
    }
  }
}

}  // namespace

void rotary_embedding(const RotaryEmbedding& a, const Pool& pool) {
  // A thread is worth waking for some ten thousand elements.
  const int64_t per_task = 1 + 16384 / ((a.q_heads + a.k_heads) * a.head_dim + 1);
  parallel_for(pool, (a.tokens + per_task - 1) / per_task, [&](int64_t task) {
    const int64_t end = (task + 1) * per_task < a.tokens ? (task + 1) * per_task : a.tokens;
    for (int64_t token = task * per_task; token < end; ++token) {
      apply_rope(a, token, a.q, a.q_norm, a.q_heads, a.q_out);
      apply_rope(a, token, a.k, a.k_norm, a.k_heads, a.k_out);
    }
  });
}

}  // namespace jaxis::JAXIS_ISA
