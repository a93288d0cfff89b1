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

#if defined(__x86_64__)

// What the instruction CPUID answers; zeros where the processor does not know the question.
struct Cpuid {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;

  explicit Cpuid(unsigned leaf, unsigned subleaf = 0) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};

// The registers that the operating system saves for each thread (XCR0): others may not be used.
inline unsigned saved_registers() {
  constexpr unsigned kOsXsaveBit = 1u << 27;  // without it, there is no instruction to ask with
  if ((Cpuid(1).ecx & kOsXsaveBit) == 0) return 0;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

inline bool has_all(unsigned value, unsigned bits) { return (value & bits) == bits; }

// What the kernels of an instruction set use. Not __builtin_cpu_supports: it reads what the compiler's run-time library
// has found out, zig's has nothing of the kind, and then it denies everything.
inline bool has_avx2() {
  constexpr unsigned kFmaBit = 1u << 12, kF16cBit = 1u << 29, kAvx2Bit = 1u << 5, kYmm = 6;
  return has_all(Cpuid(1).ecx, kFmaBit | kF16cBit) && has_all(Cpuid(7).ebx, kAvx2Bit) &&
         has_all(saved_registers(), kYmm);
}

inline bool has_avx512() {
  constexpr unsigned kBits = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  constexpr unsigned kZmm = 0xe0;
  return has_avx2() && has_all(Cpuid(7).ebx, kBits) && has_all(saved_registers(), kZmm);
}

inline bool has_avx512vnni() {
  constexpr unsigned kVnniBit = 1u << 11;
  return has_avx512() && has_all(Cpuid(7).ecx, kVnniBit);
}

inline bool has_avx512bf16() {
  constexpr unsigned kBf16Bit = 1u << 5;
  return has_avx512() && has_all(Cpuid(7, 1).eax, kBf16Bit);
}

// Dot products of bytes in 256 bits, which processors without AVX-512 have since 2021.
inline bool has_avxvnni() {
#if defined(JAXIS_EMULATE_AVXVNNI)
  return has_avx2();  // the tests do what it does: see tests/avxvnni_emulator.cc
#else
  constexpr unsigned kAvxVnniBit = 1u << 4;
  return has_avx2() && has_all(Cpuid(7, 1).eax, kAvxVnniBit);
#endif
}

// Whether there are tiles of bytes, and the operating system lets this process use them. It has to be asked, once for
// all threads, because a thread that uses tiles has eight more kilobytes to be saved.
inline bool may_use_tiles() {
#if defined(__linux__)
  constexpr unsigned kTileBits = 1u << 24 | 1u << 25;  // AMX-TILE, AMX-INT8
  if (!has_all(Cpuid(7).edx, kTileBits)) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
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
  if (std::strcmp(isa, "avx2") == 0) return has_avx2();
  if (std::strcmp(isa, "avx512") == 0) return has_avx512();
  if (std::strcmp(isa, "avxvnni") == 0) return has_avxvnni();
  if (std::strcmp(isa, "avx512vnni") == 0) return has_avx512vnni();
  if (std::strcmp(isa, "amx") == 0) return has_avx512vnni() && may_use_tiles();
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
