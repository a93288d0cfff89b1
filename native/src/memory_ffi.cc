#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "ffi_common.h"

namespace jaxis {
namespace {

constexpr uintptr_t kHugePage = 2 << 20;

// An array that is not written to: the system gives it memory when it is first used, in huge pages where it has them.
// A KV cache is that: large, filled bit by bit, and read in pieces that lie far apart.
ffi::Error run_empty(ffi::Result<ffi::AnyBuffer> out) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto begin = reinterpret_cast<uintptr_t>(out->untyped_data());
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (begin + out->size_bytes()) / kHugePage * kHugePage;
  // A hint: a system without huge pages goes on without them.
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)out;
#endif
  return ffi::Error::Success();
}

// The array as it is, in a program that XLA cannot look through.
ffi::Error run_materialize(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  if (out->element_type() != x.element_type() || out->size_bytes() != x.size_bytes()) {
    return ffi::Error::InvalidArgument("materialize: the result has not the operand's type and size");
  }
  if (out->untyped_data() != x.untyped_data()) std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  return ffi::Error::Success();
}

// A part of a table that lies in a mapped file, or in memory. A null address has rows of zeros.
struct TablePart {
  const char* rows;
  int64_t bytes;
  bool is_mapped;
};

std::vector<TablePart> table_parts(const ffi::Buffer<ffi::U32>& parts, int64_t row_bytes) {
  std::vector<TablePart> table;
  const uint32_t* fields = parts.typed_data();
  for (int64_t p = 0; p < parts.dimensions()[0]; ++p, fields += 4) {
    const uint64_t address = static_cast<uint64_t>(fields[1]) << 32 | fields[0];
    table.push_back({reinterpret_cast<const char*>(address), fields[2] * row_bytes, fields[3] != 0});
  }
  return table;
}

#if defined(__linux__)
// Advises the system on the pages that lie wholly within the bytes, or also on those that they share with others.
void advise(const char* data, int64_t bytes, int advice, bool whole_pages) {
  constexpr uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + (whole_pages ? kPage - 1 : 0)) / kPage * kPage;
  const uintptr_t end = whole_pages ? (begin + bytes) / kPage * kPage : begin + bytes;
  // A hint, which a system with larger pages does not take.
  if (first < end) (void)madvise(reinterpret_cast<void*>(first), end - first, advice);
}
#endif

// Rows of a table whose parts, but the last, have equally many. Pages of files that are read this way leave the process
// again: the table is larger than memory, and the system keeps in its cache what is used often.
ffi::Error run_mapped_rows(I32 ids, ffi::Buffer<ffi::U32> parts, ffi::Result<ffi::AnyBuffer> out) {
  const auto shape = out->dimensions();
  if (shape.size() != 2 || parts.dimensions().size() != 2 || parts.dimensions()[0] < 1 || parts.dimensions()[1] != 4 ||
      shape[0] != static_cast<int64_t>(ids.element_count())) {
    return ffi::Error::InvalidArgument("mapped_rows: the shapes do not fit each other");
  }
  const int64_t num_rows = shape[0], row_bytes = num_rows == 0 ? 0 : static_cast<int64_t>(out->size_bytes()) / num_rows;
  const std::vector<TablePart> table = table_parts(parts, row_bytes);
  const int64_t part_rows = std::max<int64_t>(parts.typed_data()[2], 1);
  const auto row_at = [&](int64_t n) -> std::pair<const TablePart*, const char*> {
    const int64_t id = ids.typed_data()[n], p = id / part_rows;
    if (id < 0 || p >= static_cast<int64_t>(table.size())) return {nullptr, nullptr};
    const int64_t offset = (id - p * part_rows) * row_bytes;
    return {&table[p], table[p].rows == nullptr || offset >= table[p].bytes ? nullptr : table[p].rows + offset};
  };
#if defined(__linux__)
  // All reads of the disk begin before the first one is waited for.
  for (int64_t n = 0; n < num_rows; ++n) {
    if (const auto [part, row] = row_at(n); row != nullptr && part->is_mapped)
      advise(row, row_bytes, MADV_WILLNEED, false);
  }
#endif
  std::vector<const TablePart*> read;
  char* to = static_cast<char*>(out->untyped_data());
  for (int64_t n = 0; n < num_rows; ++n, to += row_bytes) {
    const auto [part, row] = row_at(n);
    row == nullptr ? std::memset(to, 0, row_bytes) : std::memcpy(to, row, row_bytes);
    if (row != nullptr && part->is_mapped) read.push_back(part);
  }
#if defined(__linux__)
  std::sort(read.begin(), read.end());
  read.erase(std::unique(read.begin(), read.end()), read.end());
  for (const TablePart* part : read) advise(part->rows, part->bytes, MADV_DONTNEED, true);
#endif
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_empty, run_empty, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

JAXIS_HANDLER(jaxis_materialize, run_materialize, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

JAXIS_HANDLER(jaxis_mapped_rows, run_mapped_rows,
              ffi::Ffi::Bind().Arg<I32>().Arg<ffi::Buffer<ffi::U32>>().Ret<ffi::AnyBuffer>());
