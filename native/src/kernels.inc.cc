// Compiled once per instruction set: everything it has, and its table.
#include "kernels.h"

#include "attention.inc.cc"
#include "causal_conv.inc.cc"
#include "delta_rule.inc.cc"
#include "experts.inc.cc"
#include "filters.inc.cc"
#include "gates.inc.cc"
#include "head_matmul.inc.cc"
#include "index_selection.inc.cc"
#include "latent_attention.inc.cc"
#include "matmul.inc.cc"
#include "norm.inc.cc"
#include "quantize.inc.cc"
#include "rope.inc.cc"
#include "sampling.inc.cc"
#include "selective_scan.inc.cc"
#include "ssd.inc.cc"
#include "top_tokens.inc.cc"

#define JAXIS_TEXT_(x) #x
#define JAXIS_TEXT(x) JAXIS_TEXT_(x)

namespace jaxis::JAXIS_ISA {

constexpr Kernels make_table() {
  Kernels kernels{};
  kernels.name = JAXIS_TEXT(JAXIS_ISA);
  kernels.paged_attention = paged_attention;
  kernels.latent_attention = latent_attention;
  kernels.index_selection = index_selection;
  kernels.causal_conv = causal_conv;
  kernels.gated_delta_rule = gated_delta_rule;
  kernels.selective_scan = selective_scan;
  kernels.ssd = ssd;
  kernels.matmul = matmul;
  kernels.packed_rows = packed_rows;
  kernels.experts = experts;
  kernels.head_matmul = head_matmul;
  kernels.rms_norm = rms_norm;
  kernels.layer_norm = layer_norm;
  kernels.row_moments = row_moments;
  kernels.softplus = softplus;
  kernels.softmax = softmax;
  kernels.gated = gated;
  kernels.rotary_embedding = rotary_embedding;
  kernels.argmax = argmax;
  kernels.tile_weights = tile_weights;
  kernels.filter_tokens = filter_tokens;
  kernels.top_tokens = top_tokens;
  kernels.token_ranks = token_ranks;
  kernels.quantize = quantize;
  return kernels;
}

extern const Kernels table;
const Kernels table = make_table();

}  // namespace jaxis::JAXIS_ISA
