// The kernels of colour.cpp, one set per instruction set. Every set gives the same bytes.
#pragma once

#include <cstdint>

namespace stoker {

constexpr int kColourBlock = 512;  // pixels that planar kernels take at once

struct ColourKernels {
  // Each of `bytes` bytes through a table.
  void (*look_up)(const uint8_t* table, int64_t bytes, uint8_t* row);
  // ImageEnhance.Color: each pixel blended with its luma.
  void (*saturate)(float factor, int pixels, uint8_t* row);
  // torchvision's adjust_hue: to Pillow's HSV, the hue byte moved by `shift`, and back.
  void (*turn_hue)(int shift, int pixels, uint8_t* row);
  // The sum of Pillow's luma.
  uint64_t (*luma_sum)(const uint8_t* row, int pixels);
  // Bytes 0 .. bytes - 1 of a row blended with their smoothed values; above[-3] .. above[bytes + 2]
  // are read, and the same of the other rows.
  void (*sharpen)(float factor, const uint8_t* above, const uint8_t* row, const uint8_t* below,
                  int64_t bytes, uint8_t* out);
};

extern const ColourKernels kColourScalar;
#if defined(STOKER_X86)
extern const ColourKernels kColourAvx2;
extern const ColourKernels kColourAvx512;
#endif

}  // namespace stoker
