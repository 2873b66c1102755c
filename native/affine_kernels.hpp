// What the interpolating transforms of affine.cpp share with their AVX2 form.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stoker {

// The whole source image, and what surrounds it. A byte more than a pixel is readable and writable
// everywhere, so pixels are copied four bytes at a time.
struct AffineSource {
  const uint8_t* pixels;
  ptrdiff_t stride;
  int width, height;
  uint8_t fill[4];

  const uint8_t* row(int y) const { return pixels + y * stride; }
  bool holds(int x, int y) const {
    return static_cast<unsigned>(x) < static_cast<unsigned>(width) &&
           static_cast<unsigned>(y) < static_cast<unsigned>(height);
  }
};

// `count` pixels of an output row, from `column` on, by bilinear (2) or bicubic (4) taps.
using Interpolate = void (*)(const AffineSource& source, const double* matrix, int column, int row,
                             int count, uint8_t* out);

#if defined(STOKER_X86)
extern const Interpolate kBilinearAvx2, kBicubicAvx2;
#endif

}  // namespace stoker
