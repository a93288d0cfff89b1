// Which slots of a state cache the requests of a step read and write; see kernels/state_slots.py.
#pragma once

#include <cstdint>

namespace jaxis {

// Of the requests of a flat batch. What one request writes or keeps to, no other reads, writes or keeps to.
struct StateSlots {
  const int32_t* read;             // [R]: the slot with the state before the request's first token; -1: zeros
  const int32_t* write;            // [R]: the slot that gets it after the last token; -1: none
  const int32_t* keep;             // [R]: a second slot, which gets it after keep_after tokens; -1: none
  const int32_t* keep_after;       // [R]
  const int32_t* query_start_loc;  // [R + 1]: request r's tokens are rows [r] to [r + 1] of the flat batch
  int64_t num_requests;            // R; rows past the last request's are padding
};

}  // namespace jaxis
