// Shares one kernel's tasks out among threads.
//
// Helpers run on a pool that the caller brings (XLA's own, in production). Between two kernels they spin for a short
// while instead of going back to the pool, because a step is hundreds of kernels a few microseconds apart and waking a
// thread takes longer than many of them. A kernel never waits for a helper that has not begun: the caller works
// through all the tasks itself if it must, so a pool whose threads are busy costs speed, never progress.
#pragma once

#include <cstdint>

namespace jaxis {

// Where helpers run. `schedule` starts task(data) on some other thread, some time.
struct Pool {
  int num_threads;
  void (*schedule)(void* context, void (*task)(void*), void* data);
  void* context;
};

using Task = void (*)(void* data, int64_t index);

constexpr int kMaxPrefetchWorkers = 64;

// What the next kernel will probably read first. Helpers bring it into their caches while they wait for that kernel,
// when the memory would otherwise idle. Only a hint: nothing is read that way, so it may be out of date.
struct PrefetchHint {
  int64_t bytes = 0;  // for each worker; 0: nothing
  const void* address[kMaxPrefetchWorkers];
};

// Calls task(data, i) for each i in [0, num_tasks) and returns when all are done. Neighbouring tasks tend to run on
// one thread. Nested and concurrent calls are allowed; they run on the calling thread alone. What a task throws is
// thrown here, once no thread is at work any more; which tasks have run is then unknown. Worker w of W begins with task
// num_tasks * w / W, the same thread in each call as long as it does not go back to the pool; 0 is the caller.
void parallel_for(const Pool& pool, int64_t num_tasks, Task task, void* data, const PrefetchHint* hint);

// parallel_for with any callable.
template <typename Function>
void parallel_for(const Pool& pool, int64_t num_tasks, Function&& function, const PrefetchHint* hint = nullptr) {
  parallel_for(
      pool, num_tasks, [](void* data, int64_t index) { (*static_cast<Function*>(data))(index); }, &function, hint);
}

// Has the calling thread call `function` once its share of the tasks of the parallel_for that it is in is done. Only
// the latest function counts.
void at_end_of_share(void (*function)());

// Buffers that each thread keeps for its kernels, by what is in them.
//
// Kernels do not run inside one another, so each family has names of its own for the same buffers: a thread keeps as
// much memory as the most that one family needs. Within a family each name is another buffer.
enum class Scratch {
  // matmul, experts, head_matmul, low_rank: the caller's, but for a panel and a tile, which are the worker's.
  kRows,         // what is multiplied, laid out for the micro-kernels; of low_rank, products with the first matrices
  kPanel,        // a panel of weights, upcast or unpacked
  kTile,         // a panel's results
  kExpertOrder,  // slots of tokens by expert
  kSegments,
  kHidden,   // hidden states between an expert's products
  kOutputs,  // the experts' results, by slot
  kUpRows,   // as kRows, for matrices of another format
  kCount,    // how many buffers there are; the names below are others for those above
  // paged_attention, latent_attention, index_selection.
  kPlan = kRows,
  kPartials = kPanel,  // sums of chunks of contexts that several tasks share
  kWorkspace = kTile,  // a task's
  // gated_delta_rule, selective_scan, ssd: the caller's, but for a strip, which is the worker's.
  kKeyFactors = kRows,
  kDecays = kPanel,
  kStrip = kTile,  // of a state
  // causal_conv: the worker's.
  kConvWeights = kRows,
  kConvInputs = kPanel,
  // argmax, top_tokens, token_ranks.
  kTileResults = kRows,
  // filter_tokens.
  kLogits = kRows,
  kMasses = kPanel,
  kHistograms = kTile,
  kCounts = kExpertOrder,
};

// Scratch memory of the calling thread, 64-byte aligned, at least `bytes` long; valid until its next call for the same
// buffer on this thread. Grows and is kept.
void* scratch(Scratch buffer, int64_t bytes);

}  // namespace jaxis
