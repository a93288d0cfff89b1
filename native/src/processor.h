// What this processor and its operating system can run.
#pragma once

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
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

#if defined(__x86_64__)

// Dot products of bytes in 256 bits, which processors without AVX-512 have since 2021. Compilers' own question for it
// is younger than the instructions.
inline bool has_avxvnni() {
#if defined(JAXIS_EMULATE_AVXVNNI)
  return true;  // the tests do what it does: see tests/avxvnni_emulator.cc
#else
  constexpr unsigned kAvxVnniBit = 1u << 4;
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kAvxVnniBit) != 0;
#endif
}

#elif defined(__aarch64__)

// Extensions of the 64-bit Arm architecture, as the operating system names them.
enum class ArmExtension { kDotProd, kI8mm };

inline bool has_extension(ArmExtension extension) {
#if defined(__linux__)
  constexpr unsigned long kDotProdBit = 1ul << 20, kI8mmBit = 1ul << 13;  // HWCAP_ASIMDDP, HWCAP2_I8MM
  if (extension == ArmExtension::kDotProd) return (getauxval(AT_HWCAP) & kDotProdBit) != 0;
  return (getauxval(AT_HWCAP2) & kI8mmBit) != 0;
#elif defined(__APPLE__)
  const bool is_dotprod = extension == ArmExtension::kDotProd;
  int value = 0;
  size_t size = sizeof value;
  const char* name = is_dotprod ? "hw.optional.arm.FEAT_DotProd" : "hw.optional.arm.FEAT_I8MM";
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
#else
  return false;
#endif
}

#endif

// Whether kernels compiled for an instruction set, which CMakeLists.txt names, run here.
inline bool processor_has(const char* isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (std::strcmp(isa, "avx2") == 0) return avx2;
  if (std::strcmp(isa, "avx512") == 0) return avx512;
  if (std::strcmp(isa, "avxvnni") == 0) return avx2 && has_avxvnni();
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (std::strcmp(isa, "avx512vnni") == 0) return vnni;
  if (std::strcmp(isa, "amx") == 0) return vnni && may_use_tiles();
#endif
#if defined(__aarch64__)
  const bool dotprod = has_extension(ArmExtension::kDotProd);
  if (std::strcmp(isa, "neon") == 0) return true;
  if (std::strcmp(isa, "dotprod") == 0) return dotprod;
  if (std::strcmp(isa, "i8mm") == 0) return dotprod && has_extension(ArmExtension::kI8mm);
#endif
  return std::strcmp(isa, "portable") == 0;
}

}  // namespace jaxis
