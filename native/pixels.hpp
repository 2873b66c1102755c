// Whole-image operations on interleaved RGB bytes that are not fused into the resampler: copies for
// padding, flips, gray.
#pragma once

#include <cstddef>
#include <cstdint>

#include "geometry.hpp"
#include "plan.hpp"

namespace stoker {

// Part of an image in memory: `pixels` is the pixel at (rect.x, rect.y) of an image of width x
// height.
struct View {
  const uint8_t* pixels = nullptr;
  ptrdiff_t stride = 0;
  Rect rect;
};

// Fills `wanted` (in the coordinates of the image after the step) from `source` (coordinates before
// it). `out` holds wanted.height dense rows of wanted.width * 3 bytes. width, height: of the whole
// image before the step. source.rect must contain what source_region() names.
void apply_crop(const View& source, const Step& step, const Rect& wanted, uint8_t* out);
void apply_pad(const View& source, const Step& step, int width, int height, const Rect& wanted,
               uint8_t* out);
void apply_flip_x(const View& source, uint8_t* out);
void apply_flip_y(const View& source, uint8_t* out);
void apply_transpose(const View& source, uint8_t* out);
// In place, each pixel becomes Pillow's luma in all three channels.
void apply_gray(uint8_t* pixels, ptrdiff_t stride, int width, int height);

// The part of the image before `step` that `wanted` of the image after it needs; empty where
// nothing is needed (all fill). For every step but resize. width, height: of the image before the
// step.
Rect source_region(const Step& step, int width, int height, const Rect& wanted);

}  // namespace stoker
