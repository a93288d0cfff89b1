// Picks the instruction set when the first kernel runs.
#include <cstdlib>
#include <cstring>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "isas.h"
#include "kernels.h"

namespace jaxis {

#define JAXIS_DECLARE(isa)    \
  namespace isa {             \
  extern const Kernels table; \
  }
JAXIS_FOR_EACH_ISA(JAXIS_DECLARE)
#undef JAXIS_DECLARE

namespace {

// Whether there are tiles of bytes, and the operating system lets this process use them. It has to be asked, once for
// all threads, because a thread that uses tiles has eight more kilobytes to be saved.
[[maybe_unused]] bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kTileBits = 1u << 24 | 1u << 25;  // AMX-TILE, AMX-INT8
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kTileBits) != kTileBits) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

[[maybe_unused]] bool processor_has(const char* isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (std::strcmp(isa, "avx2") == 0) return avx2;
  if (std::strcmp(isa, "avx512") == 0) return avx512;
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (std::strcmp(isa, "avx512vnni") == 0) return vnni;
  if (std::strcmp(isa, "amx") == 0) return vnni && may_use_tiles();
#endif
  return std::strcmp(isa, "portable") == 0 || std::strcmp(isa, "neon") == 0;
}

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

}  // namespace jaxis

// What Python asks for. Null for a JAXIS_CPU_ISA that is unknown or that this processor does not run.
extern "C" __attribute__((visibility("default"))) const char* jaxis_isa() {
  const jaxis::Kernels* best = jaxis::find_kernels();
  return best == nullptr ? nullptr : best->name;
}

extern "C" __attribute__((visibility("default"))) const char* jaxis_supported_isas() { return jaxis::supported_isas(); }
