// Choosing tokens from rows of logits. Reductions over the vocabulary go by tiles of 128 tokens; see
// kernels/sampling/tiles.py, which defines them.
#pragma once

#include <cstdint>

namespace jaxis {

constexpr int64_t kVocabTile = 128;

inline int64_t num_tiles(int64_t vocab) { return (vocab + kVocabTile - 1) / kVocabTile; }

// The first of each row's largest logits; of a row with a NaN, the first NaN.
struct Argmax {
  const float* logits;  // [rows, vocab]
  int32_t* ids;         // [rows]
  float* max;           // [rows]
  int64_t rows;
  int64_t vocab;
};

// Softmax weights exp((logit - max) * inverse_temperature), summed by tile.
struct TileWeights {
  const float* logits;               // [rows, vocab]
  const float* inverse_temperature;  // [rows]
  float* tile_max;                   // [rows, tiles]
  float* tile_mass;                  // [rows, tiles]
  float* max;                        // [rows]
  float* total;                      // [rows], of tile_mass
  int64_t rows;
  int64_t vocab;
};

// Top-k, top-p and min-p as one cutoff a row; see kernels/sampling/filters.py.
struct TokenFilters {
  const float* logits;               // [rows, vocab]
  const float* inverse_temperature;  // [rows]
  const float* tile_max;             // these four: of TileWeights
  const float* tile_mass;
  const float* max;
  const float* total;
  const int32_t* top_k;      // [rows]; vocab or more keeps all
  const float* top_p;        // [rows]; 1 keeps all
  const float* min_p_logit;  // [rows]; -inf keeps all
  float* cutoff;             // [rows], the smallest logit kept; -inf in rows without a filter
  float* kept_mass;          // [rows, tiles]; may be tile_mass
  int64_t rows;
  int64_t vocab;
};

// The k largest logits of each row, largest first, lower ids first among equals.
struct TopTokens {
  const float* logits;  // [rows, vocab]
  float* values;        // [rows, k]
  int32_t* ids;         // [rows, k]
  int64_t rows;
  int64_t vocab;
  int64_t k;  // 1 to vocab
};

// 1 plus the number of logits above the row's given one.
struct TokenRanks {
  const float* logits;  // [rows, vocab]
  const float* chosen;  // [rows]
  int32_t* ranks;       // [rows]
  int64_t rows;
  int64_t vocab;
};

}  // namespace jaxis
