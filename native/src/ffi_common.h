// What all FFI handlers share: running a kernel on XLA's threads, and checks of what XLA hands over.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>

#include "attention.h"
#include "kernels.h"
#include "matmul.h"
#include "state_slots.h"
#include "team.h"
#include "xla/ffi/api/ffi.h"

namespace jaxis {

namespace ffi = xla::ffi;

using F32 = ffi::Buffer<ffi::F32>;
using I32 = ffi::Buffer<ffi::S32>;
using U8 = ffi::Buffer<ffi::U8>;
using F32Result = ffi::ResultBuffer<ffi::F32>;
using I32Result = ffi::ResultBuffer<ffi::S32>;

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

// Calls function(pool), which checks what it was given and runs a kernel. What it throws becomes XLA's error, with the
// kernel's name before it.
template <typename Function>
ffi::Error run_kernel(const char* name, ffi::ThreadPool& threads, Function&& function) {
  XlaPool pool(threads);
  try {
    function(pool.pool());
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(std::string(name) + ": " + error.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(name) + ": no memory for scratch space");
  }
  return ffi::Error::Success();
}

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

constexpr int64_t kAnySize = -1;

[[noreturn]] inline void throw_shape_error(const char* name, ffi::Span<const int64_t> shape,
                                           std::initializer_list<int64_t> expected) {
  std::ostringstream text;
  text << name << " has shape [";
  for (size_t i = 0; i < shape.size(); ++i) text << (i == 0 ? "" : ", ") << shape[i];
  text << "], expected [";
  for (const int64_t* size = expected.begin(); size != expected.end(); ++size) {
    text << (size == expected.begin() ? "" : ", ");
    *size == kAnySize ? text << "any" : text << *size;
  }
  text << "]";
  throw std::invalid_argument(text.str());
}

// Throws unless the buffer has this shape, in which kAnySize stands for any size.
template <typename Buffer>
void require_shape(const char* name, const Buffer& buffer, std::initializer_list<int64_t> expected) {
  const auto shape = buffer.dimensions();
  bool fits = shape.size() == expected.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    const int64_t size = expected.begin()[i];
    fits = size == kAnySize || size == shape[i];
  }
  if (!fits) throw_shape_error(name, shape, expected);
}

// The size of the buffer's last dimension.
template <typename Buffer>
int64_t last_dimension(const char* name, const Buffer& buffer) {
  const auto shape = buffer.dimensions();
  if (shape.size() == 0) throw std::invalid_argument(std::string(name) + " has no dimensions");
  return shape.back();
}

// A format of weights of k columns; see decode_format. Throws unless there are kernels for it.
inline WeightFormat make_weight_format(ffi::Span<const int64_t> fields, int64_t k) {
  const WeightFormat format = decode_format(fields.begin(), static_cast<int64_t>(fields.size()), k);
  const char* reason = unsupported_reason(format);
  require(reason == nullptr, reason);
  return format;
}

// Throws unless `packed` has the bytes of `count` matrices of n rows.
inline void require_packed(const char* name, const U8& packed, int64_t count, int64_t n, const WeightFormat& format) {
  if (n >= 0 && static_cast<int64_t>(packed.element_count()) == count * num_panels(n) * panel_bytes(format)) return;
  throw std::invalid_argument(std::string(name) + ": the packed weight's size does not fit its shape");
}

// Throws unless activations may be quantized in a product with such weights.
inline void require_quantizable_activations(const WeightFormat& format) {
  require(has_integer_products(format), "activations are quantized for integer weights only");
}

inline Activation make_activation(int32_t number) {
  const auto activation = static_cast<Activation>(number);
  switch (activation) {
    case Activation::kNone:
    case Activation::kSilu:
    case Activation::kGeluTanh:
    case Activation::kClampedSwiglu:
    case Activation::kReluSquared:
    case Activation::kCappedSwiglu:
    case Activation::kLimitedSwiglu:
    case Activation::kSitu:
      return activation;
  }
  throw std::invalid_argument("unknown activation " + std::to_string(number));
}

// Throws unless `slots` [R] are slots of a state cache, or -1.
inline void require_slots(const char* name, const I32& slots, int64_t num_requests, int64_t num_slots) {
  for (int64_t r = 0; r < num_requests; ++r) {
    const int32_t slot = slots.typed_data()[r];
    if (slot >= -1 && slot < num_slots) continue;
    throw std::invalid_argument(std::string(name) + " has slot " + std::to_string(slot) + " of " +
                                std::to_string(num_slots));
  }
}

// What the requests of T tokens read and write; throws unless there are such slots and rows.
inline StateSlots make_state_slots(const I32& read, const I32& write, const I32& keep, const I32& keep_after,
                                   const I32& query_start_loc, const I32& num_requests, int64_t num_slots,
                                   int64_t num_tokens) {
  require_shape("read", read, {kAnySize});
  const int64_t max_requests = read.dimensions()[0];
  require_shape("write", write, {max_requests});
  require_shape("keep", keep, {max_requests});
  require_shape("keep_after", keep_after, {max_requests});
  require_shape("query_start_loc", query_start_loc, {max_requests + 1});
  require_shape("num_requests", num_requests, {});
  const int64_t requests = num_requests.typed_data()[0];
  require(requests >= 0 && requests <= max_requests, "there are more requests than slots are given for");
  const int32_t* starts = query_start_loc.typed_data();
  for (int64_t r = 0; r < requests; ++r) {
    require(starts[r] >= 0 && starts[r] <= starts[r + 1], "query_start_loc does not ascend");
  }
  require(starts[0] >= 0 && starts[requests] <= num_tokens, "query_start_loc has rows that are not there");
  require_slots("read", read, requests, num_slots);
  require_slots("write", write, requests, num_slots);
  require_slots("keep", keep, requests, num_slots);
  return {read.typed_data(), write.typed_data(), keep.typed_data(), keep_after.typed_data(), starts, requests};
}

// Sets what a step's requests read of a paged cache, in the arguments of a kernel; throws unless the buffers fit each
// other.
template <typename Arguments>
void set_paged_requests(Arguments& a, const I32& seq_lens, const I32& block_tables, const I32& query_start_loc,
                        const I32& request_distribution) {
  require_shape("seq_lens", seq_lens, {kAnySize});
  const int64_t max_requests = seq_lens.dimensions()[0];
  require_shape("block_tables", block_tables, {max_requests, kAnySize});
  require_shape("query_start_loc", query_start_loc, {max_requests + 1});
  require_shape("request_distribution", request_distribution, {3});
  a.num_requests = request_distribution.typed_data()[2];
  require(a.num_requests >= 0 && a.num_requests <= max_requests, "there are more requests than seq_lens has");
  a.seq_lens = seq_lens.typed_data();
  a.block_tables = block_tables.typed_data();
  a.query_start_loc = query_start_loc.typed_data();
  a.max_blocks = block_tables.dimensions()[1];
}

// The type of a cache's elements.
inline CacheType make_cache_type(const ffi::AnyBuffer& cache) {
  switch (cache.element_type()) {
    case ffi::F32:
      return CacheType::kFloat32;
    case ffi::BF16:
    case ffi::U16:  // its bits: see stored_dtype of kernels/paged_cache.py
      return CacheType::kBfloat16;
    case ffi::S8:
      return CacheType::kInt8;
    default:
      break;
  }
  std::ostringstream text;
  text << "the cache has dtype " << cache.element_type() << ", expected F32, BF16 or S8";
  throw std::invalid_argument(text.str());
}

}  // namespace jaxis

// Exports `function` as the FFI handler `symbol`.
#define JAXIS_HANDLER(symbol, function, binding)                                               \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* symbol(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, binding)
