// The row kernels behind convert_rows(), one set per instruction set. Internal to convert*.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "convert.hpp"

namespace stoker {

// 1 / 255 in two floats.
constexpr float kInverse255 = static_cast<float>(1.0 / 255.0);
constexpr float kInverse255Rest = static_cast<float>(1.0 / 255.0 - double{kInverse255});

struct ConvertKernels {
  // One row in a planar format. row: interleaved RGB, kRowSlack bytes readable past its end.
  // out: the row's first element in the first plane; plane: elements from one plane to the next.
  // Writes exactly `width` elements in each of conversion.channels planes.
  void (*planar)(const Conversion& conversion, const uint8_t* row, int width, void* out,
                 size_t plane);
  // Replaces every pixel by its luma. out may be row itself; kRowSlack bytes past its end are
  // writable.
  void (*gray)(const uint8_t* row, int width, uint8_t* out);
  // Writes the row mirrored. kRowSlack bytes before out and past its end are writable.
  void (*mirror)(const uint8_t* row, int width, uint8_t* out);
};

// Note [Streaming stores]: float32 tensors are the bulk of what is written, nobody reads them soon,
// and a batch is larger than the caches. Where every row starts on a cache line, the kernels write
// them past the caches: lines need not be read first, and the caches stay with the decoder. Such
// stores are not ordered with later ones, so they are fenced once per image, before another thread
// may hear of them.

// convert_rows() without its fence, and the fence.
void convert_unfenced(SimdLevel level, const uint8_t* source, ptrdiff_t stride, int y, int rows,
                      bool flip_x, uint8_t* scratch, const Output& output);
void fence_rows();

#if defined(STOKER_X86)
constexpr int kCacheLine = 64;

// Whether `width` float32 values from `out` on fill whole lines in every plane.
static inline bool fills_lines(const float* out, size_t plane, int width) {
  return reinterpret_cast<uintptr_t>(out) % kCacheLine == 0 && plane % (kCacheLine / 4) == 0 &&
         width % (kCacheLine / 4) == 0;
}

extern const ConvertKernels kConvertAvx2;
extern const ConvertKernels kConvertAvx512;  // planar only: the rest is AVX2's
#endif

}  // namespace stoker
