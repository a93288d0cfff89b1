#include <cstdint>
#include <cstring>

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

}  // namespace
}  // namespace jaxis

using namespace jaxis;

JAXIS_HANDLER(jaxis_empty, run_empty, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

JAXIS_HANDLER(jaxis_materialize, run_materialize, ffi::Ffi::Bind().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
