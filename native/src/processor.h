// What this processor and its operating system can run.
#pragma once

#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace jaxis {

// Whether there are tiles of bytes, and the operating system lets this process use them. It has to be asked, once for
// all threads, because a thread that uses tiles has eight more kilobytes to be saved.
inline bool may_use_tiles() {
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

// Whether kernels compiled for an instruction set, which CMakeLists.txt names, run here.
inline bool processor_has(const char* isa) {
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

}  // namespace jaxis
