// The kernels of one instruction set, as a table of functions. Every instruction set compiles the same sources (the
// files *.inc.cc), so the tables differ in speed only.
#pragma once

#include <cstdint>

#include "attention.h"
#include "matmul.h"
#include "norm.h"
#include "team.h"

namespace jaxis {

struct Kernels {
  const char* name;
  void (*matmul)(const Matmul&, const Pool&);
  void (*packed_rows)(const PackedRows&, const Pool&);
  void (*paged_attention)(const PagedAttention&, const Pool&);
  void (*rms_norm)(const RmsNorm&, const Pool&);
};

// The best table that this processor runs; the environment variable JAXIS_CPU_ISA picks another by its name.
const Kernels& kernels();

// Names of the tables that this processor runs, best first, separated by spaces.
const char* supported_isas();

}  // namespace jaxis
