#include "next_weights.h"

#include <atomic>
#include <cstdint>

namespace jaxis {
namespace {

// About what a worker fetches in the time between two products; well within any second-level cache.
constexpr int64_t kBytesPerWorker = 64 * 1024;
constexpr uintptr_t kEntries = 4096;

// The panels of a product's first operands, in the order of its tasks.
struct Weights {
  const uint8_t* data[kMaxMatrices] = {};
  int64_t panels[kMaxMatrices] = {};
  int num_matrices = 0;
  int64_t panel_bytes = 0;
};

struct Entry {
  const uint8_t* key = nullptr;
  Weights next;
};

struct History {
  std::atomic<bool> busy{false};
  const uint8_t* last = nullptr;
  Entry entries[kEntries];
};

History& history() {
  static History* instance = new History;
  return *instance;
}

// Packed weights begin at pages.
Entry& entry_of(History& h, const uint8_t* key) {
  return h.entries[reinterpret_cast<uintptr_t>(key) / 4096 % kEntries];
}

Weights weights_of(const Matmul& a) {
  Weights out;
  // Of a gated pair the tasks go through the first; the second is as far along.
  out.num_matrices = a.activation != Activation::kNone ? 1 : a.num_matrices;
  for (int i = 0; i < out.num_matrices; ++i) {
    out.data[i] = a.weight[i];
    out.panels[i] = num_panels(a.n[i]);
  }
  out.panel_bytes = panel_bytes(a.format);
  return out;
}

}  // namespace

void predict_next_weights(const Matmul& now, int num_workers, PrefetchHint* hint) {
  History& h = history();
  // Products of several programs at once have no order to learn.
  if (h.busy.exchange(true, std::memory_order_acquire)) return;
  const uint8_t* key = now.weight[0];
  if (h.last != nullptr) {
    Entry& before = entry_of(h, h.last);
    before.key = h.last;
    before.next = weights_of(now);
  }
  h.last = key;
  const Entry& entry = entry_of(h, key);
  if (entry.key == key) {
    const Weights& next = entry.next;
    int64_t total = 0;
    for (int i = 0; i < next.num_matrices; ++i) total += next.panels[i];
    const int workers = num_workers < kMaxPrefetchWorkers ? num_workers : kMaxPrefetchWorkers;
    for (int worker = 1; worker < workers; ++worker) {
      int64_t panel = total * worker / num_workers;
      int matrix = 0;
      while (panel >= next.panels[matrix]) panel -= next.panels[matrix++];
      hint->address[worker] = next.data[matrix] + panel * next.panel_bytes;
    }
    hint->bytes = kBytesPerWorker;
  }
  h.busy.store(false, std::memory_order_release);
}

}  // namespace jaxis
