// Picks the instruction set when the first kernel runs.
#include <cstdlib>
#include <cstring>
#include <string>

#include "isas.h"
#include "kernels.h"
#include "processor.h"

namespace jaxis {

#define JAXIS_DECLARE(isa)    \
  namespace isa {             \
  extern const Kernels table; \
  }
JAXIS_FOR_EACH_ISA(JAXIS_DECLARE)
#undef JAXIS_DECLARE

namespace {

struct IsaChoice {
  const Kernels* best = nullptr;
  std::string names;
};

const IsaChoice& choice() {
  static const IsaChoice* instance = [] {
    auto* made = new IsaChoice;
    const char* wanted = std::getenv("JAXIS_CPU_ISA");
    // Listed best first.
#define JAXIS_CONSIDER(isa)                                                                                   \
  if (processor_has(#isa)) {                                                                                  \
    made->names += made->names.empty() ? #isa : " " #isa;                                                     \
    if (wanted != nullptr ? std::strcmp(wanted, #isa) == 0 : made->best == nullptr) made->best = &isa::table; \
  }
    JAXIS_FOR_EACH_ISA(JAXIS_CONSIDER)
#undef JAXIS_CONSIDER
    return made;
  }();
  return *instance;
}

}  // namespace

const Kernels* find_kernels() { return choice().best; }

const Kernels& kernels() { return *choice().best; }

const char* supported_isas() { return choice().names.c_str(); }

bool has_bfloat16_products() {
#if defined(__x86_64__)
  static const bool has = has_avx512bf16();
  return has;
#else
  return false;
#endif
}

}  // namespace jaxis

// What Python asks for. Null for a JAXIS_CPU_ISA that is unknown, not compiled or not run by this processor.
extern "C" __attribute__((visibility("default"))) const char* jaxis_isa() {
  const jaxis::Kernels* best = jaxis::find_kernels();
  return best == nullptr ? nullptr : best->name;
}

extern "C" __attribute__((visibility("default"))) const char* jaxis_supported_isas() { return jaxis::supported_isas(); }
