// The table of an instruction set's kernels.
#include "kernels.h"

#define JAXIS_TEXT_(x) #x
#define JAXIS_TEXT(x) JAXIS_TEXT_(x)

namespace jaxis::JAXIS_ISA {

#define JAXIS_KERNEL(function, Arguments) void function(const Arguments&, const Pool&);
JAXIS_FOR_EACH_KERNEL(JAXIS_KERNEL)
#undef JAXIS_KERNEL
bool quantize(const Quantize&);

extern const Kernels table;
const Kernels table = {
    JAXIS_TEXT(JAXIS_ISA),
#define JAXIS_KERNEL(function, Arguments) function,
    JAXIS_FOR_EACH_KERNEL(JAXIS_KERNEL)
#undef JAXIS_KERNEL
        quantize,
};

}  // namespace jaxis::JAXIS_ISA
