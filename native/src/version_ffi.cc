// Which version of XLA's FFI this library was built for; XLA refuses one that is newer than its own.
#include "xla/ffi/api/c_api.h"

extern "C" __attribute__((visibility("default"))) int jaxis_ffi_major() { return XLA_FFI_API_MAJOR; }

extern "C" __attribute__((visibility("default"))) int jaxis_ffi_minor() { return XLA_FFI_API_MINOR; }
