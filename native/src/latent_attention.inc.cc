// Attention over a paged cache of latents: shares the work out; latent_tile.h does it.
#include "latent_attention.h"

#include <cstdint>
#include <cstring>

#include "arithmetic.h"
#include "latent_tile.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {
namespace latent {

// Rows of the flat batch that one task writes to the cache.
constexpr int64_t kRowsPerWrite = 64;
// Tasks for each thread, so that all end at about the same time.
constexpr double kTasksPerThread = 6;
// Work below this, in nanoseconds, is done before helpers would be there.
constexpr double kSerialNanoseconds = 10000;

// A tile and the context that it sees, computed by one task or by several.
struct Item {
  Tile tile;
  int64_t context;  // tokens that its last row sees
  int64_t chunks_per_task;
  int64_t num_tasks;
  int64_t first_task;
  float* partials;  // of each chunk, if there are several tasks
  int64_t remaining_tasks;
};

struct Plan {
  Item* items;
  int64_t num_items;
  int32_t* item_of_task;
  int64_t num_tasks;
  double nanoseconds;  // about, on one thread
};

int64_t num_chunks(const Item& item) { return ceil_div(item.context, kChunk); }

double item_nanoseconds(const LatentAttention& a, const Item& item) {
  const double elements = static_cast<double>(item.context * (a.head_dim + a.value_dim));
  return elements * (0.05 + 0.015 * static_cast<double>(item.tile.padded_rows));
}

// The positions of a list before its -1.
int64_t count_selected(const int32_t* selected, int64_t count) {
  while (count > 0 && selected[count - 1] < 0) --count;
  return count;
}

// The items of rows [begin, end) of the flat batch, which are one request's; only counted where `items` is null.
int64_t tiles_of_queries(const LatentAttention& a, int64_t request, int64_t begin, int64_t end, const int32_t* selected,
                         Item* items) {
  const int64_t rows = (end - begin) * a.num_heads, count = ceil_div(rows, kTileRows);
  for (int64_t i = 0; i < count && items != nullptr; ++i) {
    Item& item = items[i] = {};
    Tile& tile = item.tile;
    tile.block_table = a.block_tables + request * a.max_blocks;
    tile.selected = selected;
    tile.num_selected = selected == nullptr ? 0 : count_selected(selected, a.num_selected);
    tile.first_row_of_request = begin * a.num_heads;
    tile.first_row = tile.first_row_of_request + i * kTileRows;
    tile.rows = rows - i * kTileRows < kTileRows ? rows - i * kTileRows : kTileRows;
    tile.padded_rows = ceil_div(tile.rows, kLanes) * kLanes;
    tile.first_position = a.seq_lens[request] - (a.query_start_loc[request + 1] - begin);
    item.context = selected == nullptr ? tile.position(tile.rows - 1, a.num_heads) + 1 : tile.num_selected;
  }
  return count;
}

// The items of one request; only counted where `items` is null.
int64_t tiles_of_request(const LatentAttention& a, int64_t request, Item* items) {
  const int64_t begin = a.query_start_loc[request], end = a.query_start_loc[request + 1];
  // The first row that sees selected tokens only.
  const int64_t dense_end =
      a.selected == nullptr ? end : min_of(end, max_of(begin, end - (a.seq_lens[request] - a.num_selected)));
  int64_t count = tiles_of_queries(a, request, begin, dense_end, nullptr, items);
  for (int64_t row = dense_end; row < end; ++row) {
    Item* next = items == nullptr ? nullptr : items + count;
    count += tiles_of_queries(a, request, row, row + 1, a.selected + row * a.num_selected, next);
  }
  return count;
}

Plan make_plan(const LatentAttention& a, int num_threads) {
  Plan plan{};
  int64_t max_tasks = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t count = tiles_of_request(a, r, nullptr);
    plan.num_items += count;
    max_tasks += count * ceil_div(a.seq_lens[r] + 1, kChunk);
  }
  const int64_t items_bytes = plan.num_items * static_cast<int64_t>(sizeof(Item));
  auto* memory =
      static_cast<char*>(scratch(Scratch::kPlan, items_bytes + max_tasks * static_cast<int64_t>(sizeof(int32_t))));
  plan.items = reinterpret_cast<Item*>(memory);
  plan.item_of_task = reinterpret_cast<int32_t*>(memory + items_bytes);
  Item* next = plan.items;
  for (int64_t r = 0; r < a.num_requests; ++r) next += tiles_of_request(a, r, next);
  for (int64_t i = 0; i < plan.num_items; ++i) plan.nanoseconds += item_nanoseconds(a, plan.items[i]);

  const double share = num_threads == 1 ? plan.nanoseconds : plan.nanoseconds / (kTasksPerThread * num_threads);
  int64_t partials_size = 0;
  const auto item_partials_size = [&](const Item& item) {
    return item.num_tasks == 1 ? 0 : num_chunks(item) * Sums::size(item.tile.padded_rows, a.value_dim);
  };
  for (int64_t i = 0; i < plan.num_items; ++i) {
    Item& item = plan.items[i];
    const int64_t chunks = num_chunks(item);
    const int64_t wanted = 1 + static_cast<int64_t>(item_nanoseconds(a, item) / (share + 1.0));
    item.chunks_per_task = ceil_div(chunks, wanted < chunks ? wanted : chunks);
    item.num_tasks = item.remaining_tasks = ceil_div(chunks, item.chunks_per_task);
    item.first_task = plan.num_tasks;
    for (int64_t t = 0; t < item.num_tasks; ++t) plan.item_of_task[plan.num_tasks++] = static_cast<int32_t>(i);
    partials_size += item_partials_size(item);
  }
  auto* partials =
      static_cast<float*>(scratch(Scratch::kPartials, partials_size * static_cast<int64_t>(sizeof(float))));
  for (int64_t i = 0; i < plan.num_items; ++i) {
    plan.items[i].partials = partials;
    partials += item_partials_size(plan.items[i]);
  }
  return plan;
}

// Writes rows [first, last) of the flat batch to the cache, and zeros the output's padding.
template <typename T>
void write_rows(const LatentAttention& a, int64_t first, int64_t last) {
  int64_t request = 0;
  for (int64_t row = first; row < last; ++row) {
    if (row >= a.query_start_loc[a.num_requests]) {
      const int64_t size = a.num_heads * a.value_dim;
      std::memset(a.out + row * size, 0, static_cast<size_t>((last - row) * size) * sizeof(float));
      return;
    }
    while (row >= a.query_start_loc[request + 1]) ++request;
    const int64_t position = a.seq_lens[request] - (a.query_start_loc[request + 1] - row);
    write_entry<T>(a, a.block_tables + request * a.max_blocks, row, position);
  }
}

template <typename T>
void run_task(const LatentAttention& a, const Plan& plan, int64_t task) {
  Item& item = plan.items[plan.item_of_task[task]];
  const Tile& tile = item.tile;
  const int64_t rows = tile.padded_rows, all = num_chunks(item);
  const int64_t begin = (task - item.first_task) * item.chunks_per_task;
  const int64_t end = begin + item.chunks_per_task < all ? begin + item.chunks_per_task : all;
  const int64_t bytes = Workspace::size(rows, a.head_dim, a.value_dim) * static_cast<int64_t>(sizeof(float));
  Workspace w = Workspace::at(static_cast<float*>(scratch(Scratch::kWorkspace, bytes)), rows, a.head_dim, a.value_dim);
  const auto partial = [&](int64_t chunk) {
    return Sums::at(item.partials + chunk * Sums::size(rows, a.value_dim), rows);
  };
  pack_rows(a, tile, w);
  clear(w.sum, rows, a.value_dim);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    if (item.num_tasks > 1) w.chunk = partial(chunk);
    const int64_t first = chunk * kChunk, last = first + kChunk < item.context ? first + kChunk : item.context;
    attend<T>(a, tile, first, last, w);
    if (item.num_tasks == 1) merge(w.sum, w.chunk, rows, a.value_dim);
  }
  if (item.num_tasks > 1) {
    // The last to finish puts the chunks together.
    if (__atomic_sub_fetch(&item.remaining_tasks, 1, __ATOMIC_ACQ_REL) != 0) return;
    for (int64_t chunk = 0; chunk < all; ++chunk) merge(w.sum, partial(chunk), rows, a.value_dim);
  }
  write_output(a, tile, w.sum);
}

template <typename T>
void run(const LatentAttention& a, const Pool& pool) {
  const int64_t num_writes = ceil_div(a.num_tokens, kRowsPerWrite);
  const Pool alone = {1, nullptr, nullptr};
  parallel_for(num_writes > 1 ? pool : alone, num_writes, [&](int64_t task) {
    const int64_t first = task * kRowsPerWrite;
    write_rows<T>(a, first, first + kRowsPerWrite < a.num_tokens ? first + kRowsPerWrite : a.num_tokens);
  });
  const Plan plan = make_plan(a, pool.num_threads);
  if (plan.nanoseconds < kSerialNanoseconds) {
    for (int64_t task = 0; task < plan.num_tasks; ++task) run_task<T>(a, plan, task);
  } else {
    parallel_for(pool, plan.num_tasks, [&](int64_t task) { run_task<T>(a, plan, task); });
  }
}

}  // namespace latent
}  // namespace

void latent_attention(const LatentAttention& a, const Pool& pool) {
  switch (a.type) {
    case CacheType::kFloat32:
      return latent::run<float>(a, pool);
    case CacheType::kBfloat16:
      return latent::run<bf16_t>(a, pool);
    case CacheType::kInt8:
      return latent::run<int8_t>(a, pool);
  }
}

}  // namespace jaxis::JAXIS_ISA
