// best_isa NAME...: prints the first instruction set that this machine runs. CMake asks it which to compile.
#include <cstdio>

#include "processor.h"

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (!jaxis::processor_has(argv[i])) continue;
    std::printf("%s", argv[i]);
    return 0;
  }
  return 1;
}
