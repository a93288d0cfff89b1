// Ragged paged attention: shares the work out; attention_chunk.h does it.
#include "attention.h"

#include <cstdint>
#include <cstring>

#include "arithmetic.h"
#include "attention_cache.h"
#include "attention_chunk.h"
#include "simd.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Rows of a query tile: as many as make reading and upcasting keys and values cheap beside the products.
constexpr int64_t kTileRows = 48;
// Rows of the flat batch that one task writes to the cache.
constexpr int64_t kRowsPerWrite = 16;
// Tasks for each thread, so that all end at about the same time.
constexpr double kTasksPerThread = 6;
// Work below this, in nanoseconds, is done before helpers would be there.
constexpr double kSerialNanoseconds = 10000;

// A query tile and the context that it sees, computed by one task or by several.
struct Item {
  QueryTile tile;
  int64_t first_chunk;
  int64_t num_chunks;
  int64_t chunks_per_task;
  int64_t num_tasks;
  int64_t first_task;
  float* partials;  // of each chunk, if there are several tasks
  int64_t remaining_tasks;
  bool writes;  // its last task writes the token to the cache
};

struct Plan {
  Item* items;
  int64_t num_items;
  int32_t* item_of_task;
  int64_t num_tasks;
  double nanoseconds;  // about, on one thread
};

// A decode's token is written by the task that reads it; those of longer requests are read by several tasks.
bool is_written_by_reader(int64_t num_queries) { return num_queries == 1; }

double item_nanoseconds(const Item& item, int64_t head_dim) {
  // Reading the context, and the products.
  const double tokens = static_cast<double>(item.num_chunks * kChunk);
  return tokens * static_cast<double>(head_dim) * (0.15 + 0.03 * static_cast<double>(item.tile.rows));
}

void split_items(const PagedAttention& a, Plan& plan, int num_threads) {
  const double share = num_threads == 1 ? plan.nanoseconds : plan.nanoseconds / (kTasksPerThread * num_threads);
  int64_t partials_size = 0;
  plan.num_tasks = 0;
  for (int64_t i = 0; i < plan.num_items; ++i) {
    Item& item = plan.items[i];
    const int64_t wanted = 1 + static_cast<int64_t>(item_nanoseconds(item, a.head_dim) / (share + 1.0));
    item.chunks_per_task = ceil_div(item.num_chunks, wanted < item.num_chunks ? wanted : item.num_chunks);
    item.num_tasks = ceil_div(item.num_chunks, item.chunks_per_task);
    item.remaining_tasks = item.num_tasks;
    item.first_task = plan.num_tasks;
    plan.num_tasks += item.num_tasks;
    if (item.num_tasks > 1) partials_size += item.num_chunks * Partial::size(item.tile.rows, a.head_dim);
  }
  auto* partials =
      static_cast<float*>(scratch(Scratch::kPartials, partials_size * static_cast<int64_t>(sizeof(float))));
  for (int64_t i = 0; i < plan.num_items; ++i) {
    Item& item = plan.items[i];
    if (item.num_tasks == 1) continue;
    item.partials = partials;
    partials += item.num_chunks * Partial::size(item.tile.rows, a.head_dim);
  }
}

Plan make_plan(const PagedAttention& a, int num_threads) {
  const int64_t group_size = a.num_heads / a.num_kv_heads;
  const int64_t queries_per_tile = kTileRows / group_size > 1 ? kTileRows / group_size : 1;
  Plan plan{};
  int64_t max_tasks = 0;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t num_queries = a.query_start_loc[r + 1] - a.query_start_loc[r];
    plan.num_items += ceil_div(num_queries, queries_per_tile) * a.num_kv_heads;
    max_tasks += ceil_div(num_queries, queries_per_tile) * a.num_kv_heads * ceil_div(a.seq_lens[r] + 1, kChunk);
  }
  const int64_t items_bytes = plan.num_items * static_cast<int64_t>(sizeof(Item));
  auto* memory =
      static_cast<char*>(scratch(Scratch::kPlan, items_bytes + max_tasks * static_cast<int64_t>(sizeof(int32_t))));
  plan.items = reinterpret_cast<Item*>(memory);
  plan.item_of_task = reinterpret_cast<int32_t*>(memory + items_bytes);

  Item* item = plan.items;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t begin = a.query_start_loc[r], num_queries = a.query_start_loc[r + 1] - begin;
    for (int64_t kv_head = 0; kv_head < a.num_kv_heads; ++kv_head) {
      for (int64_t query = 0; query < num_queries; query += queries_per_tile, ++item) {
        *item = {};
        item->writes = a.k != nullptr && is_written_by_reader(num_queries);
        QueryTile& tile = item->tile;
        tile.block_table = a.block_tables + r * a.max_blocks;
        tile.kv_head = kv_head;
        tile.first_row = begin + query;
        tile.num_queries = num_queries - query < queries_per_tile ? num_queries - query : queries_per_tile;
        tile.position = a.seq_lens[r] - num_queries + query;
        tile.seq_len = a.seq_lens[r];
        tile.group_size = group_size;
        tile.rows = tile.num_queries * group_size;
        item->first_chunk = first_visible(a, tile.position) / kChunk;
        const int64_t context = end_visible(a, tile, tile.position + tile.num_queries - 1);
        item->num_chunks = (context - 1) / kChunk + 1 - item->first_chunk;
        plan.nanoseconds += item_nanoseconds(*item, a.head_dim);
      }
    }
  }
  split_items(a, plan, num_threads);
  for (int64_t i = 0; i < plan.num_items; ++i) {
    for (int64_t t = 0; t < plan.items[i].num_tasks; ++t) {
      plan.item_of_task[plan.items[i].first_task + t] = static_cast<int32_t>(i);
    }
  }
  return plan;
}

// Writes rows [first, last) of the flat batch to the cache where readers do not, and zeros the output's padding.
template <typename T>
void write_rows(const PagedAttention& a, int64_t first, int64_t last) {
  int64_t request = 0;
  for (int64_t row = first; row < last; ++row) {
    if (row >= a.query_start_loc[a.num_requests]) {
      std::memset(a.out + row * a.num_heads * a.head_dim, 0,
                  static_cast<size_t>((last - row) * a.num_heads * a.head_dim) * sizeof(float));
      return;
    }
    while (row >= a.query_start_loc[request + 1]) ++request;
    const int64_t end = a.query_start_loc[request + 1];
    if (a.k == nullptr || is_written_by_reader(end - a.query_start_loc[request])) continue;
    for (int64_t kv_head = 0; kv_head < a.num_kv_heads; ++kv_head) {
      write_token<T>(a, a.block_tables + request * a.max_blocks, kv_head, row, a.seq_lens[request] - (end - row));
    }
  }
}

template <typename T>
void run_task(const PagedAttention& a, const Plan& plan, int64_t task) {
  Item& item = plan.items[plan.item_of_task[task]];
  const QueryTile& tile = item.tile;
  const int64_t begin = (task - item.first_task) * item.chunks_per_task;
  const int64_t end = begin + item.chunks_per_task < item.num_chunks ? begin + item.chunks_per_task : item.num_chunks;
  const int64_t bytes = Workspace::size(tile.rows, a.head_dim) * static_cast<int64_t>(sizeof(float));
  const Workspace w = Workspace::at(static_cast<float*>(scratch(Scratch::kWorkspace, bytes)), tile.rows, a.head_dim);
  const int64_t partial_size = Partial::size(tile.rows, a.head_dim);
  if (item.writes && end == item.num_chunks) {
    write_token<T>(a, tile.block_table, tile.kv_head, tile.first_row, tile.position);
  }
  pack_queries(a, tile, w.q);
  clear(w.sum, tile.rows, a.head_dim);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const Partial out =
        item.num_tasks == 1 ? w.chunk : Partial::at(item.partials + chunk * partial_size, tile.rows, a.head_dim);
    attend_chunk<T>(a, tile, item.first_chunk + chunk, w, out);
    if (item.num_tasks == 1) merge(w.sum, out, tile.rows, a.head_dim);
  }
  if (item.num_tasks > 1) {
    // The last to finish puts the chunks together.
    if (__atomic_sub_fetch(&item.remaining_tasks, 1, __ATOMIC_ACQ_REL) != 0) return;
    for (int64_t chunk = 0; chunk < item.num_chunks; ++chunk) {
      merge(w.sum, Partial::at(item.partials + chunk * partial_size, tile.rows, a.head_dim), tile.rows, a.head_dim);
    }
  }
  write_output(a, tile, w.sum);
}

template <typename T>
void run(const PagedAttention& a, const Pool& pool) {
  bool all_decodes = a.query_start_loc[a.num_requests] == a.num_tokens;
  for (int64_t r = 0; r < a.num_requests; ++r) {
    const int64_t num_queries = a.query_start_loc[r + 1] - a.query_start_loc[r];
    all_decodes = all_decodes && (num_queries == 0 || is_written_by_reader(num_queries));
  }
  if (!all_decodes) {
    parallel_for(pool, ceil_div(a.num_tokens, kRowsPerWrite), [&](int64_t task) {
      const int64_t first = task * kRowsPerWrite;
      write_rows<T>(a, first, first + kRowsPerWrite < a.num_tokens ? first + kRowsPerWrite : a.num_tokens);
    });
  }
  const Plan plan = make_plan(a, pool.num_threads);
  if (plan.nanoseconds < kSerialNanoseconds) {
    for (int64_t task = 0; task < plan.num_tasks; ++task) run_task<T>(a, plan, task);
  } else {
    parallel_for(pool, plan.num_tasks, [&](int64_t task) { run_task<T>(a, plan, task); });
  }
}

}  // namespace

void paged_attention(const PagedAttention& a, const Pool& pool) {
  switch (a.type) {
    case CacheType::kFloat32:
      return run<float>(a, pool);
    case CacheType::kBfloat16:
      return run<bf16_t>(a, pool);
    case CacheType::kInt8:
      return run<int8_t>(a, pool);
  }
}

}  // namespace jaxis::JAXIS_ISA
