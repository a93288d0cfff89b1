// The experts of a mixture-of-experts block.
#include "experts.h"

#include <cstdint>
#include <cstring>

#include "activations.h"
#include "arithmetic.h"
#include "expert_segments.h"
#include "matmul.h"
#include "matmul_rows.h"
#include "panel_products.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Rows, a slot of a token each, that go through all stages together: so many that the weights are worth reading, so few
// that what lies between the stages stays small.
constexpr int64_t kRowsAtOnce = 1024;

// The slots of all tokens, by expert, then by token.
struct ExpertOrder {
  int64_t size;        // slots that have an expert
  int64_t num_hit;     // experts
  int32_t* slots;      // [size] token * slots a token + slot
  int32_t* positions;  // [tokens, slots]: each token's places in `slots`, ascending, then -1
  int32_t* experts;    // [num_hit]
  int32_t* starts;     // [num_hit + 1]: where each one's slots begin
};

ExpertOrder order_by_expert(const Experts& a) {
  const int64_t all = a.tokens * a.slots;
  auto* memory = static_cast<int32_t*>(scratch(Scratch::kExpertOrder, (2 * all + 3 * a.num_experts + 1) * 4));
  ExpertOrder order{0, 0, memory, memory + all, memory + 2 * all, memory + 2 * all + a.num_experts};
  int32_t* next = order.starts + a.num_experts + 1;  // by expert: how many, then where its next slot goes
  const auto is_expert = [&](int32_t id) { return id >= 0 && id < a.num_experts; };
  for (int64_t e = 0; e < a.num_experts; ++e) next[e] = 0;
  for (int64_t i = 0; i < all; ++i) {
    if (is_expert(a.ids[i])) ++next[a.ids[i]];
  }
  for (int64_t e = 0; e < a.num_experts; ++e) {
    const int32_t count = next[e];
    next[e] = static_cast<int32_t>(order.size);
    if (count == 0) continue;
    order.experts[order.num_hit] = static_cast<int32_t>(e);
    order.starts[order.num_hit++] = static_cast<int32_t>(order.size);
    order.size += count;
  }
  order.starts[order.num_hit] = static_cast<int32_t>(order.size);
  for (int64_t t = 0; t < a.tokens; ++t) {
    int32_t* positions = order.positions + t * a.slots;
    int64_t num = 0;
    for (int64_t s = 0; s < a.slots; ++s) {
      const int32_t id = a.ids[t * a.slots + s];
      if (!is_expert(id)) continue;
      const int32_t position = next[id]++;
      order.slots[position] = static_cast<int32_t>(t * a.slots + s);
      int64_t at = num++;
      for (; at > 0 && positions[at - 1] > position; --at) positions[at] = positions[at - 1];
      positions[at] = position;
    }
    for (; num < a.slots; ++num) positions[num] = -1;
  }
  return order;
}

// Here and below, limits come first: min and max may return their second operand where one is NaN, which must not get
// lost.
F32x16 clamped_swiglu(const Experts& a, F32x16 gate, F32x16 up) {
  const F32x16 one = broadcast(1.0f), limit = broadcast(a.limit);
  const F32x16 g = min(limit, gate);
  const F32x16 sigmoid = one / (one + exp(g * broadcast(-a.alpha)));
  return g * sigmoid * (max(zero() - limit, min(limit, up)) + one);
}

F32x16 capped_swiglu(const Experts& a, F32x16 gate, F32x16 up) {
  const F32x16 limit = broadcast(a.limit);
  return min(limit, apply_activation(Activation::kSilu, gate)) * max(zero() - limit, min(limit, up));
}

F32x16 limited_swiglu(const Experts& a, F32x16 gate, F32x16 up) {
  const F32x16 limit = broadcast(a.limit);
  return apply_activation(Activation::kSilu, min(limit, gate)) * max(zero() - limit, min(limit, up));
}

F32x16 tanh(F32x16 x) {
  // A continued fraction of an eighth of x, which loses no bits near 0, unlike 1 - 2 / (exp(2 x) + 1). Then, three
  // times, tanh of twice as much: 2 y / (1 + y * y).
  const F32x16 limit = broadcast(9.0f), one = broadcast(1.0f), whole = broadcast(945.0f);
  const F32x16 part = max(zero() - limit, min(limit, x)) * broadcast(0.125f), square = part * part;
  const F32x16 below = fma(fma(broadcast(15.0f), square, broadcast(420.0f)), square, whole);
  F32x16 y = part * fma(square + broadcast(105.0f), square, whole) / below;
  for (int i = 0; i < 3; ++i) y = (y + y) / fma(y, y, one);
  return y;
}

F32x16 situ(const Experts& a, F32x16 gate, F32x16 up) {
  const F32x16 alpha = broadcast(a.alpha), limit = broadcast(a.limit);
  const F32x16 unit = alpha * tanh(gate / alpha) / (broadcast(1.0f) + exp(zero() - gate));
  return unit * (a.limit == 0.0f ? up : limit * tanh(up / limit));
}

F32x16 relu_squared(F32x16 x) {
  const F32x16 positive = max(zero(), x);
  return positive * positive;
}

F32x16 apply_activation(const Experts& a, F32x16 gate, F32x16 up) {
  if (a.activation == Activation::kReluSquared) return relu_squared(up);
  if (a.activation == Activation::kClampedSwiglu) return clamped_swiglu(a, gate, up);
  if (a.activation == Activation::kCappedSwiglu) return capped_swiglu(a, gate, up);
  if (a.activation == Activation::kLimitedSwiglu) return limited_swiglu(a, gate, up);
  if (a.activation == Activation::kSitu) return situ(a, gate, up);
  return apply_activation(a.activation, gate) * up;
}

// Adds the expert's bias, if there is one, to a tile [num_rows][32] of its panel.
void add_bias(const ExpertMatrices& m, int64_t expert, int64_t panel, int64_t num_rows, float* tile) {
  if (m.bias == nullptr) return;
  const int64_t first = panel * kPanelRows, size = min_of(kPanelRows, m.n - first);
  alignas(64) float bias[kPanelRows] = {};
  for (int64_t i = 0; i < size; ++i) bias[i] = m.bias[expert * m.n + first + i];
  const F32x16 low = load(bias), high = load(bias + kLanes);
  for (int64_t r = 0; r < num_rows; ++r, tile += kPanelRows) {
    store(tile, load(tile) + low);
    store(tile + kLanes, load(tile + kLanes) + high);
  }
}

// Adds their slots' rows of an addend [slots, n], if there is one, to a tile [num_rows][32] of a panel.
void add_of_slots(const float* addend, const int32_t* slots, int64_t n, int64_t panel, int64_t num_rows, float* tile) {
  if (addend == nullptr) return;
  const int64_t first = panel * kPanelRows, size = min_of(kPanelRows, n - first);
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t i = 0; i < size; ++i) tile[r * kPanelRows + i] += addend[slots[r] * n + first + i];
  }
}

}  // namespace

void experts(const Experts& a, const Pool& pool) {
  if (a.tokens == 0) return;
  const int64_t size = a.gate.format.k, hidden_size = a.gate.n, out_size = a.down.n;
  const ExpertOrder order = order_by_expert(a);
  auto* segments = static_cast<Segment*>(
      scratch(Scratch::kSegments, min_of(order.num_hit, kRowsAtOnce) * static_cast<int64_t>(sizeof(Segment))));
  const int64_t most_rows = min_of(order.size, kRowsAtOnce);
  float* hidden = static_cast<float*>(scratch(Scratch::kHidden, most_rows * hidden_size * 4));
  float* outputs = static_cast<float*>(scratch(Scratch::kOutputs, most_rows * out_size * 4));
  const int64_t gate_bytes = panel_bytes(a.gate.format), up_bytes = panel_bytes(a.up.format);
  const int64_t down_bytes = panel_bytes(a.down.format);
  const bool is_one_format = are_equal(a.gate.format, a.up.format);
  const bool has_gate = a.activation != Activation::kReluSquared;
  if (order.size == 0) std::memset(a.out, 0, static_cast<size_t>(a.tokens * out_size * 4));
  if (a.hidden != nullptr) std::memset(a.hidden, 0, static_cast<size_t>(a.tokens * a.slots * hidden_size * 4));

  for (int64_t begin = 0, hit = 0; begin < order.size; begin += kRowsAtOnce) {
    const int64_t end = min_of(begin + kRowsAtOnce, order.size);
    int64_t num_segments = 0;
    for (int64_t first = begin; first < end; ++num_segments) {
      const int64_t last = min_of(order.starts[hit + 1], end);
      segments[num_segments] = {order.experts[hit], first, {}, {}};
      segments[num_segments].rows.rows = last - first;
      if (last == order.starts[hit + 1]) ++hit;
      first = last;
    }

    const auto row_of_x = [&](int64_t place) { return a.x + order.slots[place] / a.slots * size; };
    prepare_segments(segments, num_segments, a.gate.format, a.quantize_activations, pool, row_of_x);
    if (!is_one_format) {
      prepare_segments(segments, num_segments, a.up.format, a.quantize_activations, pool, row_of_x, &Segment::up_rows,
                       Scratch::kUpRows);
    }
    for_each_panel(
        segments, num_segments, a.gate, pool,
        [&](const Segment& segment, int64_t panel, int64_t first_row, int64_t num_rows) {
          float* gate = static_cast<float*>(scratch(Scratch::kTile, 2 * num_rows * kPanelRows * 4));
          float* up = gate + num_rows * kPanelRows;
          const Rows& up_rows = is_one_format ? segment.rows : segment.up_rows;
          const int32_t* slots = order.slots + segment.first + first_row;
          if (has_gate) {
            multiply_rows(segment.rows, a.gate.format, a.gate.of(segment.expert) + panel * gate_bytes, first_row,
                          num_rows, gate);
            add_bias(a.gate, segment.expert, panel, num_rows, gate);
            add_of_slots(a.gate_addend, slots, hidden_size, panel, num_rows, gate);
          }
          multiply_rows(up_rows, a.up.format, a.up.of(segment.expert) + panel * up_bytes, first_row, num_rows, up);
          add_bias(a.up, segment.expert, panel, num_rows, up);
          add_of_slots(a.up_addend, slots, hidden_size, panel, num_rows, up);
          for (int64_t i = 0; i < num_rows * kPanelRows; i += kLanes) {
            const F32x16 gates = has_gate ? load(gate + i) : zero();
            store(gate + i, apply_activation(a, gates, load(up + i)));
          }
          store_tile(gate, num_rows, hidden_size, panel, hidden + (segment.first - begin + first_row) * hidden_size);
        });

    const Pool alone = {1, nullptr, nullptr};
    if (a.hidden != nullptr) {
      parallel_for((end - begin) * hidden_size > kParallelElements ? pool : alone, end - begin, [&](int64_t i) {
        std::memcpy(a.hidden + order.slots[begin + i] * hidden_size, hidden + i * hidden_size,
                    static_cast<size_t>(hidden_size * 4));
      });
    }
    prepare_segments(segments, num_segments, a.down.format, a.quantize_activations, pool,
                     [&](int64_t place) { return hidden + (place - begin) * hidden_size; });
    for_each_panel(segments, num_segments, a.down, pool,
                   [&](const Segment& segment, int64_t panel, int64_t first_row, int64_t num_rows) {
                     float* tile = static_cast<float*>(scratch(Scratch::kTile, num_rows * kPanelRows * 4));
                     multiply_rows(segment.rows, a.down.format, a.down.of(segment.expert) + panel * down_bytes,
                                   first_row, num_rows, tile);
                     add_bias(a.down, segment.expert, panel, num_rows, tile);
                     store_tile(tile, num_rows, out_size, panel,
                                outputs + (segment.first - begin + first_row) * out_size);
                   });

    parallel_for((end - begin) * out_size > kParallelElements ? pool : alone, a.tokens, [&](int64_t t) {
      float* out = a.out + t * out_size;
      if (begin == 0) std::memset(out, 0, static_cast<size_t>(out_size * 4));
      for (int64_t i = 0; i < a.slots; ++i) {
        const int64_t place = order.positions[t * a.slots + i];
        if (place < begin || place >= end) continue;
        const float* from = outputs + (place - begin) * out_size;
        const float weight = a.weights[order.slots[place]];
        int64_t c = 0;
        for (; c + kLanes <= out_size; c += kLanes) {
          store(out + c, load(out + c) + broadcast(weight) * load(from + c));
        }
        for (; c < out_size; ++c) out[c] += weight * from[c];
      }
    });
  }
}

}  // namespace jaxis::JAXIS_ISA
