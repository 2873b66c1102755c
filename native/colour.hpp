// Colour operations on interleaved RGB bytes, as Pillow's ImageEnhance and ImageOps and
// torchvision's hue have them.
#pragma once

#include <cstdint>

#include "pixels.hpp"
#include "plan.hpp"
#include "simd.hpp"

namespace stoker {

// True for the kinds that apply_colour() does: each pixel's result depends on the pixel and on
// statistics of the whole image.
bool is_colour(Step::Kind kind);

// True for those that need the statistics: `whole` must be the whole image.
bool needs_whole(Step::Kind kind);

// In place on `wanted`, a part of `whole`; pixels of `whole` outside of it are read only.
void apply_colour(SimdLevel level, const Step& step, const View& whole, const Rect& wanted);

// Image.filter(SMOOTH) and the blend of ImageEnhance.Sharpness: fills `wanted`, dense rows.
// source.rect must hold `wanted` and its neighbours inside of the image; width, height: of the
// whole image.
void apply_sharpness(SimdLevel level, const View& source, const Step& step, int width, int height,
                     const Rect& wanted, uint8_t* out);

}  // namespace stoker
