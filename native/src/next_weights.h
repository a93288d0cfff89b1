// Guesses which weights the next product will read: those that followed last time.
//
// A step's kernels run in the same order each time. Between two products, while norms, ropes and XLA's own operations
// run, the memory idles; knowing what comes, helpers begin to fetch it.
#pragma once

#include <cstdint>

#include "matmul.h"
#include "team.h"

namespace jaxis {

constexpr int64_t kMaxRowsToPrefetch = 4;

// Remembers that `now` follows the product before it, and sets `hint` to where each worker will begin in the product
// that followed `now` last time.
void predict_next_weights(const Matmul& now, int num_workers, PrefetchHint* hint);

}  // namespace jaxis
