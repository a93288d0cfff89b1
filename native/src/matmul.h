// Products of float32 rows with packed weight matrices.
//
// A weight matrix [n, k] is packed in panels of 32 output rows (the last one filled up with zeros), each a single run
// of memory, so that a product with few rows is one stream and a product with many finds a panel ready to use:
//
//   kF32   [k][32] float32
//   kBf16  [k2 / 2][32][2] bfloat16, k2 = k rounded up to 2; of two columns the second comes first
//   kInt8  [k4 / 4][32][4] unsigned bytes, 128 more than the weights without their scales, k4 = k rounded up to 32;
//          then [32] float32 scales
//   kFp8   for each group (the last one may be cut off): [32] float32 scales, [columns / 2][32][2] e4m3, columns
//          rounded up to 2
//   kMxfp4 for each group: [32] e8m0 scales, [group / 8][32] words of eight e2m1, the first in the lowest bits
//   kCodes for each super-block: [32] super-scales and super-minima, if there are any; then for each group in it (for
//          each two, of 16 columns): its [32] scales, minima and zero points, as far as there are any, and units
//
// A unit is 32 columns of codes of 2, 4, 5, 6 or 8 bits, in planes:
//
//   8 bits            [8][32][4] bytes: steps of four columns
//   2 bits            [2][32][4] bytes: of 16 columns, step by step from the lowest bits up
//   4 bits, and more  [4][32][4] bytes: the low half is of columns 0 to 15, the high half of 16 to 31
//   5 bits            then [8][2] words of 64 bits: bit 4 of a step's [16][4] codes
//   6 bits            then [2][32][4] bytes: bits 4 and 5 of 16 columns, step by step from the lowest bits up
//
// An element of kCodes is scale * (value - zero_point) + minimum: the value is a level, or the code less the format's
// offset; scales and minima are multiplied by those of their super-block.
//
// Of kFp8, kMxfp4 and kCodes a product is the sum over groups (of at most 32 columns, of kCodes) of scale * (the sum of
// x * number), each sum in the columns' order; the minimum times the sum of the group's x is added after the group.
//
// Activations may be quantized to int8, 32 columns at a time: x ~ scale * q + midpoint, where the scale is (max - min)
// / 254, the midpoint (max + min) / 2 and q round-half-even((x - midpoint) / scale), from -127 to 127. Then products of
// kInt8 and kCodes are the sums over parts of at most 32 columns (16, where the weights' groups are of 16), in the
// columns' order, of
//
//   (x's scale * weights' scale) * (the sum of q * w) + x's midpoint * (weights' scale * the sum of w)
//   + minimum * (the part's sum of scale * q + midpoint)
//
// where w is the code less its zero; activations that are whole numbers up to 127 may be taken as they are, with scales
// of 1 and midpoints of 0; both sums of integers are exact. Of kInt8 the weights' scale comes last instead.
#pragma once

#include <cstdint>

#include "team.h"

namespace jaxis {

constexpr int kPanelRows = 32;
constexpr int kMaxMatrices = 4;
// Columns of a row of activations that are quantized together.
constexpr int64_t kActivationGroup = 32;
// Columns of a unit of codes. Groups of codes are multiples of it, or half of it, and at most kMaxGroup.
constexpr int64_t kUnit = 32;
constexpr int64_t kMaxGroup = 128;
constexpr int kMaxLevels = 16;

enum class WeightType : int32_t { kF32 = 0, kBf16 = 1, kInt8 = 2, kCodes = 3, kFp8 = 4, kMxfp4 = 5 };

constexpr bool is_block_scaled(WeightType type) { return type == WeightType::kFp8 || type == WeightType::kMxfp4; }

// Types of scales and minima.
enum class ScaleType : int32_t { kNone = 0, kF32 = 1, kBf16 = 2, kF16 = 3, kU8 = 4, kI8 = 5, kE4m3 = 6 };

// -1 if the type is unknown.
constexpr int64_t bytes_of(ScaleType type) {
  switch (type) {
    case ScaleType::kNone:
      return 0;
    case ScaleType::kF32:
      return 4;
    case ScaleType::kBf16:
    case ScaleType::kF16:
      return 2;
    case ScaleType::kU8:
    case ScaleType::kI8:
    case ScaleType::kE4m3:
      return 1;
  }
  return -1;
}

// What an MLP makes of its first two products, gate and up.
enum class Activation : int32_t {
  kNone = 0,           // nothing: the products are results of their own
  kSilu = 1,           // silu(gate) * up
  kGeluTanh = 2,       // gelu(gate) * up, by its approximation with tanh
  kClampedSwiglu = 3,  // g * sigmoid(alpha * g) * (clip(up, -limit, limit) + 1), g = min(gate, limit); of experts only
  kReluSquared = 4,    // max(up, 0) ** 2, without a gate; of experts only
  kCappedSwiglu = 5,   // min(silu(gate), limit) * clip(up, -limit, limit); of experts only
  kLimitedSwiglu = 6,  // silu(min(gate, limit)) * clip(up, -limit, limit); of experts only
  kSitu = 7,  // alpha * tanh(gate / alpha) * sigmoid(gate) * (limit * tanh(up / limit), or up if limit is 0); as above
};

struct WeightFormat {
  WeightType type;
  int64_t k;
  int64_t group;  // columns a scale; 0: one scale a row (kInt8), or none
  // The rest is of kCodes only.
  int64_t bits;           // of a code: 2, 4, 5, 6 or 8
  int64_t offset;         // what a code is more than its value
  ScaleType scale;        // not kNone
  ScaleType minimum;      // kNone: there are none
  bool has_zero_points;   // bytes
  ScaleType super_scale;  // of super-scales, and of super-minima where there are minima; kNone, kF16 or kF32
  int64_t super_block;    // columns
  bool has_levels;        // of 4 bits
  float levels[kMaxLevels];
};

// Why there are no kernels for such weights; null if there are. Formats that come from outside are checked with it
// once: all that follows relies on a known type and on groups that fit.
const char* unsupported_reason(const WeightFormat& format);

bool are_equal(const WeightFormat& a, const WeightFormat& b);

// A format as Python passes it, `size` numbers in the order of the fields, without k; the levels as the bits of
// float32. Throws nothing: a `size` that does not fit gives an unknown type.
WeightFormat decode_format(const int64_t* fields, int64_t size, int64_t k);

// Where things are in a panel of kCodes. A span is the columns that stand together: a group, or two groups of 16.
struct CodeLayout {
  int64_t span;             // columns
  int64_t groups_per_span;  // 1 or 2
  int64_t units_per_span;
  int64_t spans_per_super;                // of the whole row, if there are no super-blocks
  int64_t super_minimum_at, super_bytes;  // in a super-block: after the super-scales; where its first span begins
  int64_t scale_bytes;                    // of one, and so below
  int64_t minimum_bytes;
  int64_t minimum_at, zero_point_at, unit_at;  // in a span, after the scales
  int64_t unit_bytes, span_bytes;
  int64_t num_spans;
};

CodeLayout code_layout(const WeightFormat& format);

// Levels that are whole numbers, as bytes: a level is its byte less `zero`.
struct ByteLevels {
  bool exist;
  uint8_t bytes[kMaxLevels];
  int32_t zero;
};

ByteLevels byte_levels(const WeightFormat& format);

// Whether products with activations of int8 are of whole numbers.
bool has_integer_products(const WeightFormat& format);

int64_t panel_bytes(const WeightFormat& format);

// Whether this processor has AVX-512's products of two bfloat16 at once.
bool has_bfloat16_products();

inline int64_t num_panels(int64_t n) { return (n + kPanelRows - 1) / kPanelRows; }

// out[i] = y[i] = (x weight[i]^T + addend[i]) * factor[i], element by element, for matrices of one format. With an
// activation: out[0] = activation(y[0]) * y[1].
struct Matmul {
  const float* x;  // [rows, k]
  int64_t rows;
  WeightFormat format;
  bool quantize_activations;  // to int8, in groups; if has_integer_products
  bool x_is_integer;          // whole numbers from -127 to 127, which quantizing leaves as they are
  bool x_is_bfloat16;         // numbers of bfloat16, which some processors multiply faster
  Activation activation;
  int num_matrices;
  const uint8_t* weight[kMaxMatrices];
  int64_t n[kMaxMatrices];
  const float* addend[kMaxMatrices];  // [rows, n]; null: nothing is added
  const float* factor[kMaxMatrices];  // [rows, n]; null: 1
  float* out[kMaxMatrices];           // [rows, n]
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

// Packs panels [first, last) of a matrix; the arrays are whole matrices in row order, those of groups [n, groups]:
//   kF32, kBf16: data [n, k]
//   kInt8: data int8 [n, k], scales float32 [n]
//   kFp8: data [n, k], scales float32 [n, k / group rounded up]
//   kMxfp4: data [n, k / 2], two elements a byte, low half first; scales [n, k / 32] bytes
//   kCodes: the lower two (of two and three bits), four (of four to six) or eight bits of each code in `data` and the
//     others in `high`, earlier columns in lower bits; scales, minima and zero points of groups and of super-blocks
struct Pack {
  WeightFormat format;
  int64_t n;
  const void* data;
  const void* scales;
  // The rest is of kCodes only.
  int64_t source_bits;  // 2, 3, 4, 5, 6 or 8; the format's, or fewer than its 4
  bool is_signed;       // codes of 8 bits are int8, and become 128 more
  const uint8_t* high;  // null: no bits are there
  const uint8_t* zero_points;
  const void* minima;
  const void* super_scales;
  const void* super_minima;
  uint8_t* packed;
};

void pack_panels(const Pack& pack, int64_t first, int64_t last);

}  // namespace jaxis
