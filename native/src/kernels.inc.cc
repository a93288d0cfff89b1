// Compiled once per instruction set: everything it has, and its table.
#include "kernels.h"

#include "attention.inc.cc"
#include "matmul.inc.cc"
#include "norm.inc.cc"

#define JAXIS_TEXT_(x) #x
#define JAXIS_TEXT(x) JAXIS_TEXT_(x)

namespace jaxis::JAXIS_ISA {

extern const Kernels table;
const Kernels table = {JAXIS_TEXT(JAXIS_ISA), matmul, packed_rows, paged_attention, rms_norm};

}  // namespace jaxis::JAXIS_ISA
