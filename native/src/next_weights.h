// Predicts which weights the next product will read, so that idle threads can fetch their beginning from memory.
//
// What: a table remembers, for each product by the address of its weights, which product came after it last time. A
// decoding step runs the same kernels in the same order as the step before, so what followed last time follows again.
// Helpers that have finished their share of a product prefetch, each into its own second-level cache, the first 64 KiB
// of the panels that they will multiply next.
//
// Why: with few rows a product takes as long as reading its weights does, and between two products, while norms, ropes
// and XLA's own operations run, the memory would be idle. With many rows arithmetic takes longer than memory, and
// nothing is predicted.
//
// A wrong prediction costs bandwidth and nothing else: only prefetch instructions use the address, never loads.
#pragma once

#include <cstdint>

#include "matmul.h"
#include "team.h"

namespace jaxis {

// Products of more rows are not worth it.
constexpr int64_t kMaxRowsToPrefetch = 4;

// Remembers that `now` follows the product before it, and sets `hint` to where each worker will begin in the product
// that followed `now` last time.
void predict_next_weights(const Matmul& now, int num_workers, PrefetchHint* hint);

}  // namespace jaxis
