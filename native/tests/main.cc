// jaxis_tests [GROUP]: runs all tests, or those of a group. JAXIS_CPU_ISA picks the instruction set.
#include <cstdio>
#include <cstring>

#include "testing.h"

namespace {
constexpr int kSkipped = 77;
}

int main(int argc, char** argv) {
  if (jaxis::find_kernels() == nullptr) {
    std::printf("this processor runs only: %s\n", jaxis::supported_isas());
    return kSkipped;
  }
  int run = 0;
  int failed = 0;
  for (const jaxis::testing::Test& test : jaxis::testing::tests()) {
    if (argc > 1 && test.group != argv[1]) continue;
    ++run;
    try {
      test.run();
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED %s.%s\n  %s\n", test.group.c_str(), test.name.c_str(), error.what());
    }
  }
  std::printf("%s: %d of %d tests passed\n", jaxis::kernels().name, run - failed, run);
  return run == 0 || failed != 0;
}
