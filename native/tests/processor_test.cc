#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "isas.h"
#include "testing.h"

using namespace jaxis;

namespace {

// What the instruction sets need, in Linux's words.
const std::map<std::string, std::vector<std::string>>& needs() {
  static const auto* map = new std::map<std::string, std::vector<std::string>>{
      {"avx2", {"avx2", "fma", "f16c"}},
      {"avxvnni", {"avx2", "fma", "f16c", "avx_vnni"}},
      {"avx512", {"avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl"}},
      {"avx512vnni", {"avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"}},
      {"dotprod", {"asimddp"}},
      {"i8mm", {"asimddp", "i8mm"}},
      {"neon", {}},
      {"portable", {}},
  };
  return *map;
}

// The features that Linux lists for this processor, each between blanks. Empty without Linux, and under an emulator of
// programs, where the list is of the machine that emulates.
std::string listed_features() {
#if defined(__x86_64__)
  const std::string heading = "flags";
#else
  const std::string heading = "Features";
#endif
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, heading.size(), heading) == 0) return line.substr(line.find(':') + 1) + " ";
  }
  return "";
}

bool has_word(const std::string& words, const std::string& word) {
  return (" " + words + " ").find(" " + word + " ") != std::string::npos;
}

}  // namespace

TEST(processor, runs_the_instruction_sets_whose_features_linux_lists) {
  const std::string listed = listed_features();
  if (listed.empty()) return;
  std::istringstream compiled(
#define NAME(isa) #isa " "
      JAXIS_FOR_EACH_ISA(NAME)
#undef NAME
  );
  for (std::string isa; compiled >> isa;) {
    if (isa == "amx") continue;  // a matter of permission too
    bool expected = true;
    for (const std::string& feature : needs().at(isa)) expected = expected && has_word(listed, feature);
    CHECK(has_word(supported_isas(), isa) == expected, isa, supported_isas(), listed);
  }
}
