// The kernels of one instruction set, as a table of functions. Every instruction set compiles the same sources (the
// files *.inc.cc), in a namespace of its own. Sums have the same order in all of them, so the tables differ in speed,
// and in the last bits only where multiply-adds are not fused (see simd.h).
#pragma once

#include <cstdint>

#include "attention.h"
#include "causal_conv.h"
#include "delta_rule.h"
#include "experts.h"
#include "gates.h"
#include "head_matmul.h"
#include "index_selection.h"
#include "latent_attention.h"
#include "low_rank.h"
#include "matmul.h"
#include "norm.h"
#include "quantize.h"
#include "rope.h"
#include "sampling.h"
#include "selective_scan.h"
#include "sequence_attention.h"
#include "ssd.h"
#include "team.h"

namespace jaxis {

// Every kernel: its function, and the struct of its arguments.
#define JAXIS_FOR_EACH_KERNEL(X)                            \
  X(paged_attention, PagedAttention)                        \
  X(latent_attention, LatentAttention)                      \
  X(index_selection, IndexSelection)                        \
  X(sequence_attention, SequenceAttention)                  \
  X(sequence_attention_gradient, SequenceAttentionGradient) \
  X(causal_conv, CausalConv)                                \
  X(gated_delta_rule, GatedDeltaRule)                       \
  X(selective_scan, SelectiveScan)                          \
  X(ssd, Ssd)                                               \
  X(matmul, Matmul)                                         \
  X(packed_rows, PackedRows)                                \
  X(experts, Experts)                                       \
  X(head_matmul, HeadMatmul)                                \
  X(low_rank, LowRank)                                      \
  X(rms_norm, RmsNorm)                                      \
  X(layer_norm, LayerNorm)                                  \
  X(row_moments, RowMoments)                                \
  X(softplus, Softplus)                                     \
  X(softmax, Softmax)                                       \
  X(gated, Gated)                                           \
  X(rotary_embedding, RotaryEmbedding)                      \
  X(argmax, Argmax)                                         \
  X(tile_weights, TileWeights)                              \
  X(filter_tokens, TokenFilters)                            \
  X(top_tokens, TopTokens)                                  \
  X(token_ranks, TokenRanks)

struct Kernels {
  const char* name;
#define JAXIS_KERNEL(function, Arguments) void (*function)(const Arguments&, const Pool&);
  JAXIS_FOR_EACH_KERNEL(JAXIS_KERNEL)
#undef JAXIS_KERNEL
  bool (*quantize)(const Quantize&);  // whether all weights and scales are finite
};

// The best table that this processor runs; the environment variable JAXIS_CPU_ISA picks another by its name. Null for a
// name that is unknown, was not compiled or does not run on this processor, and where none that was compiled does.
const Kernels* find_kernels();

// The same, where it is known not to be null.
const Kernels& kernels();

// Names of the compiled tables that this processor runs, best first, separated by spaces.
const char* supported_isas();

}  // namespace jaxis
