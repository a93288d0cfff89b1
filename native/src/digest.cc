// A digest of bytes at the speed of memory, which finds what a disk or a copy changed by mistake.
#include <cstdint>
#include <cstring>

namespace jaxis {
namespace {

constexpr int kLanes = 8;
constexpr uint64_t kFactor = 0x9e3779b97f4a7c15u;  // odd

// For a given state, different words give different states, so a change within one word is always found.
uint64_t mix(uint64_t state, uint64_t word) {
  state ^= word;
  return (state << 29 | state >> 35) * kFactor;
}

uint64_t digest_of(const uint8_t* data, int64_t size) {
  constexpr int64_t kBlock = kLanes * sizeof(uint64_t);
  uint64_t lanes[kLanes], words[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<uint64_t>(i + 1) * kFactor;
  for (int64_t at = 0; at < size; at += kBlock) {
    if (size - at < kBlock) std::memset(words, 0, sizeof words);
    std::memcpy(words, data + at, static_cast<size_t>(size - at < kBlock ? size - at : kBlock));
    for (int i = 0; i < kLanes; ++i) lanes[i] = mix(lanes[i], words[i]);
  }
  uint64_t digest = static_cast<uint64_t>(size);
  for (const uint64_t lane : lanes) digest = mix(digest, lane);
  return digest;
}

}  // namespace
}  // namespace jaxis

extern "C" __attribute__((visibility("default"))) void jaxis_digests(const uint8_t* const* data, const int64_t* sizes,
                                                                     int64_t count, uint64_t* digests) {
  for (int64_t i = 0; i < count; ++i) digests[i] = jaxis::digest_of(data[i], sizes[i]);
}
