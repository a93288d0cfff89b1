// What all FFI handlers share.
#pragma once

#include <new>
#include <string>

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace jaxis {

namespace ffi = xla::ffi;

// XLA's thread pool as a kernel wants it. Must outlive the kernel call only.
class XlaPool {
 public:
  explicit XlaPool(ffi::ThreadPool& threads) : threads_(threads) {}

  Pool pool() {
    return {static_cast<int>(threads_.num_threads()),
            [](void* context, void (*task)(void*), void* data) {
              static_cast<XlaPool*>(context)->threads_.Schedule([task, data] { task(data); });
            },
            this};
  }

 private:
  ffi::ThreadPool& threads_;
};

// Runs a kernel; what it throws becomes XLA's error.
template <typename Function>
ffi::Error run_kernel(ffi::ThreadPool& threads, Function&& function) {
  XlaPool pool(threads);
  try {
    function(pool.pool());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for a kernel's scratch space");
  }
  return ffi::Error::Success();
}

}  // namespace jaxis

// Exports `function` as the FFI handler `symbol`.
#define JAXIS_HANDLER(symbol, function, binding)                                               \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, binding)
