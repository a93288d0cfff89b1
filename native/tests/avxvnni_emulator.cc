// Runs the kernels of `avxvnni` where a processor has AVX2 alone: its one instruction more, vpdpbusd with a VEX prefix,
// is an illegal one there, and what it does is done here. So the tests run the very bytes that such a processor would.
//
// Linked into the tests if CMake is asked to: JAXIS_EMULATE_AVXVNNI.
#include <cpuid.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace {

// Vector registers as the kernel saved them (the "XSAVE area"): the lower halves at a fixed place, the upper ones at
// one that the processor tells.
struct VectorRegisters {
  uint8_t* area;
  uint32_t upper_at;

  uint8_t* half(int number, bool upper) const { return area + (upper ? upper_at : 160u) + 16 * number; }
};

int64_t general_register(const ucontext_t* context, int number) {
  constexpr int kOrder[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[kOrder[number]];
}

template <typename Number>
Number read(const uint8_t* p) {
  Number out;
  std::memcpy(&out, p, sizeof out);
  return out;
}

void dot(uint8_t* sums, const uint8_t* w, const uint8_t* x) {
  for (int lane = 0; lane < 4; ++lane, sums += 4) {
    uint32_t sum = read<uint32_t>(sums);
    for (int i = 0; i < 4; ++i, ++w, ++x) sum += static_cast<uint32_t>(*w * static_cast<int8_t>(*x));
    std::memcpy(sums, &sum, 4);
  }
}

// vpdpbusd: C4, ~R ~X ~B and map 2, ~vvvv L and prefix 66, opcode 50, the place of the last operand.
bool emulate(ucontext_t* context, const VectorRegisters& registers) {
  greg_t& next = context->uc_mcontext.gregs[REG_RIP];
  const auto* code = reinterpret_cast<const uint8_t*>(next);
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x83) != 1 || code[3] != 0x50) return false;
  const bool is_256 = (code[2] & 4) != 0;
  const int high_reg = code[1] & 0x80 ? 0 : 8, high_index = code[1] & 0x40 ? 0 : 8, high_base = code[1] & 0x20 ? 0 : 8;
  const int sum = (code[4] >> 3 & 7) | high_reg, w = ~code[2] >> 3 & 15, mode = code[4] >> 6, place = code[4] & 7;
  const uint8_t* end = code + 5;
  const uint8_t* memory = nullptr;
  if (mode != 3) {
    int64_t address = 0;
    bool has_base = true;
    int base = place | high_base;
    if (place == 4) {
      const int scale = *end >> 6, index = (*end >> 3 & 7) | high_index;
      base = (*end & 7) | high_base;
      has_base = (*end & 7) != 5 || mode != 0;
      if (index != 4) address += general_register(context, index) << scale;
      ++end;
    } else if (place == 5 && mode == 0) {
      has_base = false;
      address = reinterpret_cast<int64_t>(end + 4);  // relative to the next instruction
    }
    if (has_base) address += general_register(context, base);
    if (mode == 1) {
      address += read<int8_t>(end);
      end += 1;
    } else if (mode == 2 || !has_base) {
      address += read<int32_t>(end);
      end += 4;
    }
    memory = reinterpret_cast<const uint8_t*>(address);
  }
  for (const bool upper : {false, true}) {
    uint8_t* to = registers.half(sum, upper);
    if (upper && !is_256) {
      std::memset(to, 0, 16);
    } else {
      dot(to, registers.half(w, upper),
          memory != nullptr ? memory + (upper ? 16 : 0) : registers.half(place | high_base, upper));
    }
  }
  next = reinterpret_cast<greg_t>(end);
  return true;
}

void on_illegal_instruction(int, siginfo_t*, void* context_) {
  auto* context = static_cast<ucontext_t*>(context_);
  static const uint32_t upper_at = [] {
    unsigned eax, ebx, ecx, edx;
    __get_cpuid_count(0xd, 2, &eax, &ebx, &ecx, &edx);
    return ebx;
  }();
  auto* area = reinterpret_cast<uint8_t*>(context->uc_mcontext.fpregs);
  // Upper halves that are all zero need not have been saved.
  constexpr uint64_t kUpperHalves = 4;
  uint64_t saved = read<uint64_t>(area + 512);
  if ((saved & kUpperHalves) == 0) std::memset(area + upper_at, 0, 256);
  saved |= kUpperHalves;
  std::memcpy(area + 512, &saved, 8);
  if (emulate(context, {area, upper_at})) return;
  std::fputs("an illegal instruction that is not emulated\n", stderr);
  std::abort();
}

const int installed = [] {
  struct sigaction action{};
  action.sa_sigaction = on_illegal_instruction;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGILL, &action, nullptr);
}();

}  // namespace
