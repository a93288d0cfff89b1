// Mamba's selective scan.
#pragma once

#include <cstdint>

#include "state_slots.h"

namespace jaxis {

// T tokens, I channels, each with a state of N elements that decay each at its own rate. For each channel i, token by
// token:
//
//   S[n] = exp(dt * a[n]) * S[n] + dt * x * b[n];  y = sum_n S[n] * c[n] + d * x
//
// Channels are independent of each other, and each sum over N has one order.
struct SelectiveScan {
  const float* x;   // [T, I]
  const float* dt;  // [T, I]
  const float* a;   // [I, N]
  const float* b;   // [T, N]
  const float* c;   // [T, N]
  const float* d;   // [I]
  float* state;     // [num_slots, N, I]
  float* y;         // [T, I]
  StateSlots slots;
  int64_t num_tokens;
  int64_t num_channels;  // I
  int64_t state_size;    // N
};

}  // namespace jaxis
