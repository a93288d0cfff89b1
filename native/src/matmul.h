// Products of float32 rows with packed weight matrices.
//
// A weight matrix [n, k] is packed in panels of 32 output rows (the last one filled up with zeros), each a single run
// of memory, so that a product with few rows is one stream and a product with many finds a panel ready to use:
//
//   kF32   [k][32] float32
//   kBf16  [k2 / 2][32][2] bfloat16, k2 = k rounded up to 2
//   kInt8  [k4 / 4][32][4] unsigned bytes; one group a row: k4 = k rounded up to 64, then [32] float32 scales
//          or, for each group of `group` columns: [group / 4][32][4] bytes, [32] scales, [32] zero points
//   kInt4  for each group: [group / 8][32][4] bytes (low half: columns of the group's first half; high half: of its
//          second), [32] scales, [32] zero points
//   kFp8   for each group (the last one may be cut off): [32] float32 scales, [columns / 2][32][2] e4m3, columns
//          rounded up to 2
//   kMxfp4 for each group: [32] e8m0 scales, [group / 8][32] words of eight e2m1, the first in the lowest bits
//
// Of kInt8 and kInt4: scales of groups are bfloat16, or float32 if `has_wide_scales`. Zero points are there only if
// `has_zero_points`; otherwise they are 128 (kInt8) and 8 (kInt4). A weight is scale * (q - zero_point).
//
// Of kFp8 and kMxfp4, whose weights are scale * number: a product is the sum over groups of scale * (the sum of x *
// number), each sum in the columns' order.
#pragma once

#include <cstdint>

#include "team.h"

namespace jaxis {

constexpr int kPanelRows = 32;
constexpr int kMaxMatrices = 4;
// Columns that share an activation's scale where the weights have one scale a row.
constexpr int64_t kActivationGroup = 64;
// Groups of kInt8 and kInt4 are multiples of the first, the steps of an unrolled loop, and at most the second.
constexpr int64_t kGroupUnit = 32;
constexpr int64_t kMaxGroup = 128;

enum class WeightType : int32_t { kF32 = 0, kBf16 = 1, kInt8 = 2, kInt4 = 3, kFp8 = 4, kMxfp4 = 5 };

constexpr bool is_block_scaled(WeightType type) { return type == WeightType::kFp8 || type == WeightType::kMxfp4; }

// What an MLP makes of its first two products, gate and up.
enum class Activation : int32_t {
  kNone = 0,           // nothing: the products are results of their own
  kSilu = 1,           // silu(gate) * up
  kGeluTanh = 2,       // gelu(gate) * up, by its approximation with tanh
  kClampedSwiglu = 3,  // g * sigmoid(alpha * g) * (clip(up, -limit, limit) + 1), g = min(gate, limit); of experts only
};

struct WeightFormat {
  WeightType type;
  int64_t k;
  int64_t group;  // columns a scale, even; 0: one scale a row (kInt8), or none
  bool has_zero_points;
  bool has_wide_scales;
};

// Why there are no kernels for such weights; null if there are. Formats that come from outside are checked with it
// once: all that follows relies on a known type and on groups that fit.
const char* unsupported_reason(const WeightFormat& format);

int64_t panel_bytes(const WeightFormat& format);

inline int64_t num_panels(int64_t n) { return (n + kPanelRows - 1) / kPanelRows; }

// out[i] = x weight[i]^T, for matrices of one format. With an activation: out[0] = activation(x weight[0]^T) * (x
// weight[1]^T), element by element.
struct Matmul {
  const float* x;  // [rows, k]
  int64_t rows;
  WeightFormat format;
  bool quantize_activations;  // to int8, by row and group; for kInt8 and kInt4
  Activation activation;
  int num_matrices;
  const uint8_t* weight[kMaxMatrices];
  int64_t n[kMaxMatrices];
  float* out[kMaxMatrices];  // [rows, n]
};

// out[i] = row ids[i] of the matrix as float32; ids are clamped into [0, n).
struct PackedRows {
  const int32_t* ids;
  int64_t count;
  WeightFormat format;
  const uint8_t* weight;
  int64_t n;
  float* out;  // [count, k]
};

// Packs panels [first, last) of a matrix; `data`, `scales` and `zero_points` are whole matrices in row order:
//   kF32, kBf16: data [n, k], scales and zero_points null
//   kInt8: data int8 [n, k] (signed; unsigned with zero points), scales float32 [n], or [n, k / group]
//   kInt4: data [n, k / 2], two unsigned elements a byte, low half first; scales [n, k / group]
//   kFp8: data [n, k], scales float32 [n, k / group rounded up]
//   kMxfp4: data [n, k / 2], two elements a byte, low half first; scales [n, k / 32] bytes
// zero_points: [n, k / group] bytes.
struct Pack {
  WeightFormat format;
  int64_t n;
  const void* data;
  const void* scales;
  const uint8_t* zero_points;
  uint8_t* packed;
};

void pack_panels(const Pack& pack, int64_t first, int64_t last);

}  // namespace jaxis
