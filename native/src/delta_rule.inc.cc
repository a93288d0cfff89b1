// The gated delta rule: a task is a strip of columns of one head's state, over all of a request's tokens.
//
// The strip stays in the cache. Between two tokens it is read and written once: that pass adds the one token's update,
// applies the next one's decay, and sums what the next one's key and query read. With D = decay * S, what a query reads
// after the update is q (D + k^T u) = q D + (q k) u, so it need not wait for it. Lengths of keys and queries are
// factors of sums and updates; the vectors themselves are used as they come.
#include "delta_rule.h"

#include <cmath>
#include <cstdint>

#include "arithmetic.h"
#include "simd.h"
#include "state_requests.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

constexpr int kStripVectors = 2;
constexpr int64_t kStripColumns = kStripVectors * kLanes;

// Of a token's key head, after which its key and query are of the length that the rule asks for.
struct KeyFactors {
  float key;
  float query;
  float product;  // of query and key without their factors
};

// What does not depend on the value head's strip.
struct DeltaRulePlan {
  KeyFactors* factors;  // [T, Hk]
  float* decays;        // [T, Hv, num_decays]
};

KeyFactors key_factors(const GatedDeltaRule& a, const float* q, const float* k) {
  F32x16 queries = zero(), keys = zero(), products = zero();
  for (int64_t i = 0; i < a.key_dim; i += kLanes) {
    const F32x16 query = load_part(q + i, a.key_dim - i), key = load_part(k + i, a.key_dim - i);
    queries = fma(query, query, queries);
    keys = fma(key, key, keys);
    products = fma(query, key, products);
  }
  const float product = reduce_add(products);
  if (!a.has_norm) return {1.0f, a.scale, product};
  return {1.0f / std::sqrt(reduce_add(keys) + a.epsilon), a.scale / std::sqrt(reduce_add(queries) + a.epsilon),
          product};
}

DeltaRulePlan make_delta_rule_plan(const GatedDeltaRule& a, const Pool& pool) {
  const int64_t rows = num_rows(a.slots), decays = a.num_heads * a.num_decays;
  DeltaRulePlan plan{};
  plan.factors = static_cast<KeyFactors*>(
      scratch(Scratch::kKeyFactors, rows * a.num_key_heads * static_cast<int64_t>(sizeof(KeyFactors))));
  plan.decays = static_cast<float*>(scratch(Scratch::kDecays, rows * decays * static_cast<int64_t>(sizeof(float))));
  for_each_state_row(rows, 2 * a.num_key_heads * a.key_dim + decays, pool, [&](int64_t row) {
    for (int64_t head = row * a.num_key_heads; head < (row + 1) * a.num_key_heads; ++head) {
      plan.factors[head] = key_factors(a, a.q + head * a.key_dim, a.k + head * a.key_dim);
    }
    const float* logs = a.log_decay + row * decays;
    float* out = plan.decays + row * decays;
    for (int64_t i = 0; i < decays; i += kLanes) store_part(out + i, exp(load_part(logs + i, decays - i)), decays - i);
  });
  return plan;
}

// One token's part in a strip.
struct DeltaRuleToken {
  const float* q;
  const float* k;
  const float* decays;
  const float* v;  // of the strip's columns
  float* out;
  float beta;
  KeyFactors factors;
};

// A strip of up to kVectors * 16 columns of the state of a value head.
template <int kVectors>
class DeltaRuleStrip {
 public:
  DeltaRuleStrip(const GatedDeltaRule& a, int64_t columns)
      : a_(a),
        columns_(columns),
        decayed_(static_cast<float*>(
            scratch(Scratch::kStrip, a.key_dim * kVectors * kLanes * static_cast<int64_t>(sizeof(float))))) {}

  // Reads a state [key_dim, value_dim], from which columns are taken, for the first token; null: zeros.
  void begin(const float* state, const DeltaRuleToken& token) {
    const int64_t value_dim = a_.value_dim;
    decay_and_sum(token,
                  [&](int64_t i, int j) { return state == nullptr ? zero() : load_columns(state + i * value_dim, j); });
  }

  // Computes the token's update and its output.
  void update(const DeltaRuleToken& token) {
    const F32x16 key_factor = broadcast(token.factors.key);
    for (int j = 0; j < kVectors; ++j) {
      const F32x16 error = load_columns(token.v, j) - key_factor * by_key_[j];
      update_[j] = broadcast(token.beta) * error * key_factor;
      const F32x16 out = fma(broadcast(token.factors.product), update_[j], by_query_[j]);
      store_columns(token.out, out * broadcast(token.factors.query), j);
    }
  }

  // Adds the token's update and goes on to the next one.
  void advance(const DeltaRuleToken& token, const DeltaRuleToken& next) {
    const float* const keys = token.k;
    const float* const decayed = decayed_;
    F32x16 update[kVectors];
    for (int j = 0; j < kVectors; ++j) update[j] = update_[j];
    decay_and_sum(next, [&](int64_t i, int j) {
      return fma(broadcast(keys[i]), update[j], load(decayed + (i * kVectors + j) * kLanes));
    });
  }

  // Writes the state after the token's update.
  void write(float* state, const DeltaRuleToken& token) const {
    for (int64_t i = 0; i < a_.key_dim; ++i) {
      const F32x16 key = broadcast(token.k[i]);
      for (int j = 0; j < kVectors; ++j) {
        store_columns(state + i * a_.value_dim, fma(key, update_[j], load(decayed_ + (i * kVectors + j) * kLanes)), j);
      }
    }
  }

 private:
  // Decays the state, whose vector j of row i is state(i, j), and sums what the token's key and query read from it.
  template <typename State>
  JAXIS_INLINE void decay_and_sum(const DeltaRuleToken& token, const State& state) {
    const float *const keys = token.k, *const queries = token.q, *const decays = token.decays;
    const int64_t key_dim = a_.key_dim, decay_step = a_.num_decays == 1 ? 0 : 1;
    float* const decayed = decayed_;
    // Not the members: what is stored below might change those, as far as the compiler knows.
    F32x16 by_key[kVectors], by_query[kVectors];
    for (int j = 0; j < kVectors; ++j) by_key[j] = by_query[j] = zero();
    for (int64_t i = 0; i < key_dim; ++i) {
      const F32x16 key = broadcast(keys[i]), query = broadcast(queries[i]), decay = broadcast(decays[i * decay_step]);
      for (int j = 0; j < kVectors; ++j) {
        const F32x16 row = decay * state(i, j);
        store(decayed + (i * kVectors + j) * kLanes, row);
        by_key[j] = fma(key, row, by_key[j]);
        by_query[j] = fma(query, row, by_query[j]);
      }
    }
    for (int j = 0; j < kVectors; ++j) {
      by_key_[j] = by_key[j];
      by_query_[j] = by_query[j];
    }
  }

  JAXIS_INLINE F32x16 load_columns(const float* p, int j) const {
    return load_part(p + j * kLanes, columns_ - j * kLanes);
  }

  JAXIS_INLINE void store_columns(float* p, F32x16 x, int j) const {
    store_part(p + j * kLanes, x, columns_ - j * kLanes);
  }

  const GatedDeltaRule& a_;
  int64_t columns_;
  float* decayed_;  // [key_dim][kVectors][16]
  F32x16 by_key_[kVectors];
  F32x16 by_query_[kVectors];
  F32x16 update_[kVectors];
};

template <int kVectors>
void run_strip(const GatedDeltaRule& a, const DeltaRulePlan& plan, const StateRequest& request, int64_t head,
               int64_t column) {
  const int64_t key_heads = a.num_key_heads, key_head = head / (a.num_heads / key_heads);
  const auto token_at = [&](int64_t count) {
    const int64_t row = request.first_row + count, of_head = row * a.num_heads + head;
    const int64_t of_key = row * key_heads + key_head, of_value = of_head * a.value_dim + column;
    return DeltaRuleToken{a.q + of_key * a.key_dim, a.k + of_key * a.key_dim, plan.decays + of_head * a.num_decays,
                          a.v + of_value,           a.out + of_value,         a.beta[of_head],
                          plan.factors[of_key]};
  };
  const auto state_in = [&](int64_t slot) {
    return slot < 0 ? nullptr : a.state + (slot * a.num_heads + head) * a.key_dim * a.value_dim + column;
  };
  DeltaRuleStrip<kVectors> strip(a, min_of(a.value_dim - column, kVectors * kLanes));
  DeltaRuleToken token = token_at(0);
  strip.begin(state_in(request.read), token);
  for (int64_t count = 1;; ++count) {
    strip.update(token);
    if (request.keeps_after(count)) strip.write(state_in(request.keep), token);
    if (count == request.num_tokens) break;
    const DeltaRuleToken next = token_at(count);
    strip.advance(token, next);
    token = next;
  }
  if (request.write >= 0) strip.write(state_in(request.write), token);
}

}  // namespace

void gated_delta_rule(const GatedDeltaRule& a, const Pool& pool) {
  zero_padding(a.slots, a.out, a.num_tokens, a.num_heads * a.value_dim, pool);
  const DeltaRulePlan plan = make_delta_rule_plan(a, pool);
  const int64_t strips = ceil_div(a.value_dim, kStripColumns), per_request = a.num_heads * strips;
  const int64_t elements = num_rows(a.slots) * a.num_heads * a.key_dim * a.value_dim;
  run_state_tasks(pool, a.slots.num_requests * per_request, elements, [&](int64_t task) {
    const StateRequest request = state_request(a.slots, task / per_request);
    if (request.num_tokens == 0) return;
    const int64_t head = task % per_request / strips, column = task % strips * kStripColumns;
    if (a.value_dim - column > kLanes) {
      run_strip<kStripVectors>(a, plan, request, head, column);
    } else {
      run_strip<1>(a, plan, request, head, column);
    }
  });
}

}  // namespace jaxis::JAXIS_ISA
