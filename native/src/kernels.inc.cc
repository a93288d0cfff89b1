// Compiled once per instruction set: everything it has, and its table.
#include "kernels.h"

#include "attention.inc.cc"
#include "filters.inc.cc"
#include "latent_attention.inc.cc"
#include "matmul.inc.cc"
#include "experts.inc.cc"
#include "head_matmul.inc.cc"
#include "norm.inc.cc"
#include "quantize.inc.cc"
#include "rope.inc.cc"
#include "sampling.inc.cc"
#include "top_tokens.inc.cc"

#define JAXIS_TEXT_(x) #x
#define JAXIS_TEXT(x) JAXIS_TEXT_(x)

namespace jaxis::JAXIS_ISA {

extern const Kernels table;
const Kernels table = {
    JAXIS_TEXT(JAXIS_ISA),
    paged_attention,
    latent_attention,
    matmul,
    packed_rows,
    experts,
    head_matmul,
    rms_norm,
    layer_norm,
    rotary_embedding,
    argmax,
    tile_weights,
    filter_tokens,
    top_tokens,
    token_ranks,
    quantize,
};

}  // namespace jaxis::JAXIS_ISA
