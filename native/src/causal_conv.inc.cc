// Short causal convolution: a task is a block of channels, over all of a request's tokens.
#include "causal_conv.h"

#include <cstdint>
#include <cstring>

#include "activations.h"
#include "arithmetic.h"
#include "low_precision_floats.h"
#include "simd.h"
#include "state_requests.h"
#include "team.h"

namespace jaxis::JAXIS_ISA {
namespace {

// Elements of x that one task is worth.
constexpr int64_t kConvTaskElements = 4096;

struct ConvF32 {
  using Element = float;
  static JAXIS_INLINE F32x16 load(const float* p) { return JAXIS_ISA::load(p); }
};
struct ConvBf16 {
  using Element = bf16_t;
  static JAXIS_INLINE F32x16 load(const bf16_t* p) { return load_bf16(p); }
};
struct ConvF16 {
  using Element = uint16_t;
  static JAXIS_INLINE F32x16 load(const uint16_t* p) { return load_f16(p); }
};

template <typename Type>
JAXIS_INLINE F32x16 load_inputs(const typename Type::Element* p, int64_t count) {
  if (count >= kLanes) return Type::load(p);
  typename Type::Element lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(lanes[0]));
  return Type::load(lanes);
}

// A block of channels of one request.
template <typename Type>
class ConvBlock {
 public:
  using Element = typename Type::Element;

  ConvBlock(const CausalConv& a, const StateRequest& request, int64_t first, int64_t channels)
      : a_(a), request_(request), first_(first), channels_(channels), padded_(ceil_div(channels, kLanes) * kLanes) {
    const int64_t weights_bytes = (a.width + 1) * padded_ * static_cast<int64_t>(sizeof(float));
    const int64_t inputs_bytes = (a.width - 1) * channels * static_cast<int64_t>(sizeof(Element));
    weights_ = static_cast<float*>(scratch(Scratch::kConvWeights, weights_bytes));
    earlier_ = static_cast<Element*>(scratch(Scratch::kConvInputs, inputs_bytes));
    std::memset(weights_, 0, static_cast<size_t>(weights_bytes));
    for (int64_t c = 0; c < channels; ++c) {
      if (a.bias != nullptr) weights_[c] = a.bias[first + c];
      for (int64_t tap = 0; tap < a.width; ++tap) {
        weights_[(tap + 1) * padded_ + c] = a.weight[(first + c) * a.width + tap];
      }
    }
    // Copied, because the slot may be written to while it is needed.
    if (request.read < 0) {
      std::memset(earlier_, 0, static_cast<size_t>(inputs_bytes));
      return;
    }
    for (int64_t i = 0; i < a.width - 1; ++i) copy_row(earlier_ + i * channels, state_row(request.read, i));
  }

  template <int kWidth>
  void convolve() const {
    for (int64_t count = 0; count < request_.num_tokens; ++count) {
      const Element* inputs[kWidth];
      for (int tap = 0; tap < kWidth; ++tap) inputs[tap] = input_row(count - (kWidth - 1) + tap);
      float* y = a_.y + (request_.first_row + count) * a_.num_channels + first_;
      for (int64_t c = 0; c < channels_; c += kLanes) {
        F32x16 sum = load(weights_ + c);
        for (int tap = 0; tap < kWidth; ++tap) {
          sum = fma(load(weights_ + (tap + 1) * padded_ + c), load_inputs<Type>(inputs[tap] + c, channels_ - c), sum);
        }
        if (a_.activation == Activation::kSilu) sum = apply_activation(Activation::kSilu, sum);
        store_part(y + c, sum, channels_ - c);
      }
    }
  }

  // Writes the last inputs of the first `count` tokens to a slot.
  void write(int64_t slot, int64_t count) const {
    for (int64_t i = 0; i < a_.width - 1; ++i) copy_row(state_row(slot, i), input_row(count - (a_.width - 1) + i));
  }

 private:
  void copy_row(Element* to, const Element* from) const {
    std::memcpy(to, from, static_cast<size_t>(channels_) * sizeof(Element));
  }

  Element* state_row(int64_t slot, int64_t i) const {
    return static_cast<Element*>(a_.state) + (slot * (a_.width - 1) + i) * a_.num_channels + first_;
  }

  // The block's inputs at token `count` of the request in this step; negative: before it.
  const Element* input_row(int64_t count) const {
    if (count < 0) return earlier_ + (a_.width - 1 + count) * channels_;
    return static_cast<const Element*>(a_.x) + (request_.first_row + count) * a_.num_channels + first_;
  }

  const CausalConv& a_;
  const StateRequest& request_;
  int64_t first_;
  int64_t channels_;
  int64_t padded_;    // channels_, rounded up to whole vectors
  float* weights_;    // [1 + W, padded_]: biases, and the taps
  Element* earlier_;  // [W - 1, channels_]
};

template <typename Type>
void run_conv(const CausalConv& a, const Pool& pool) {
  const int64_t rows = num_rows(a.slots), requests = a.slots.num_requests;
  if (rows == 0) return;
  const int64_t wanted = ceil_div(kConvTaskElements * requests, rows * kLanes) * kLanes;
  const int64_t per_task = max_of(4 * kLanes, min_of(wanted, a.num_channels)),
                blocks = ceil_div(a.num_channels, per_task);
  run_state_tasks(pool, requests * blocks, rows * a.num_channels, [&](int64_t task) {
    const StateRequest request = state_request(a.slots, task / blocks);
    if (request.num_tokens == 0) return;
    const int64_t first = task % blocks * per_task;
    const ConvBlock<Type> block(a, request, first, min_of(per_task, a.num_channels - first));
    with_count<kMaxConvWidth>(static_cast<int>(a.width), [&](auto width) { block.template convolve<width>(); });
    if (request.keep >= 0 && request.keep_after >= 1 && request.keep_after <= request.num_tokens) {
      block.write(request.keep, request.keep_after);
    }
    if (request.write >= 0) block.write(request.write, request.num_tokens);
  });
}

}  // namespace

void causal_conv(const CausalConv& a, const Pool& pool) {
  zero_padding(a.slots, a.y, a.num_tokens, a.num_channels, pool);
  switch (a.type) {
    case FloatType::kF32:
      return run_conv<ConvF32>(a, pool);
    case FloatType::kBf16:
      return run_conv<ConvBf16>(a, pool);
    case FloatType::kF16:
      return run_conv<ConvF16>(a, pool);
  }
}

}  // namespace jaxis::JAXIS_ISA
