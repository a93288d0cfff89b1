// The kernels of one instruction set, as a table of functions. Every instruction set compiles the same sources (the
// files *.inc.cc). Sums have the same order in all of them, so the tables differ in speed, and in the last bits only
// where multiply-adds are not fused (see simd.h).
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
#include "matmul.h"
#include "norm.h"
#include "quantize.h"
#include "rope.h"
#include "sampling.h"
#include "selective_scan.h"
#include "ssd.h"
#include "team.h"

namespace jaxis {

struct Kernels {
  const char* name;
  void (*paged_attention)(const PagedAttention&, const Pool&);
  void (*latent_attention)(const LatentAttention&, const Pool&);
  void (*index_selection)(const IndexSelection&, const Pool&);
  void (*causal_conv)(const CausalConv&, const Pool&);
  void (*gated_delta_rule)(const GatedDeltaRule&, const Pool&);
  void (*selective_scan)(const SelectiveScan&, const Pool&);
  void (*ssd)(const Ssd&, const Pool&);
  void (*matmul)(const Matmul&, const Pool&);
  void (*packed_rows)(const PackedRows&, const Pool&);
  void (*experts)(const Experts&, const Pool&);
  void (*head_matmul)(const HeadMatmul&, const Pool&);
  void (*rms_norm)(const RmsNorm&, const Pool&);
  void (*layer_norm)(const LayerNorm&, const Pool&);
  void (*row_moments)(const RowMoments&, const Pool&);
  void (*softplus)(const Softplus&, const Pool&);
  void (*softmax)(const Softmax&, const Pool&);
  void (*gated)(const Gated&, const Pool&);
  void (*rotary_embedding)(const RotaryEmbedding&, const Pool&);
  void (*argmax)(const Argmax&, const Pool&);
  void (*tile_weights)(const TileWeights&, const Pool&);
  void (*filter_tokens)(const TokenFilters&, const Pool&);
  void (*top_tokens)(const TopTokens&, const Pool&);
  void (*token_ranks)(const TokenRanks&, const Pool&);
  bool (*quantize)(const Quantize&);  // whether all weights and scales are finite
};

// The best table that this processor runs; the environment variable JAXIS_CPU_ISA picks another by its name. Null for a
// name that is unknown or that this processor does not run.
const Kernels* find_kernels();

// The same, where it is known not to be null.
const Kernels& kernels();

// Names of the tables that this processor runs, best first, separated by spaces.
const char* supported_isas();

}  // namespace jaxis
