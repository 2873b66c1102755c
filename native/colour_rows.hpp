// The colour kernels in plain loops that compilers vectorise. Included by each colour_<level>.cpp,
// which is compiled for its instruction set; nothing here leaves that file.
//
// Note [Pillow's arithmetic]: each float or double below is rounded where Pillow's C code rounds
// it, and the build forbids contraction, so vectors and scalars give the same bytes. Selections
// replace Pillow's branches; both sides are always computed, from divisors that are never 0.
#pragma once

#include <cstdint>

#include "colour_kernels.hpp"

namespace stoker {
namespace {

struct Planes {
  uint8_t red[kColourBlock], green[kColourBlock], blue[kColourBlock];
};

inline void take_apart(const uint8_t* row, int pixels, Planes& planes) {
  for (int i = 0; i < pixels; ++i) {
    planes.red[i] = row[3 * i];
    planes.green[i] = row[3 * i + 1];
    planes.blue[i] = row[3 * i + 2];
  }
}

inline void put_together(const Planes& planes, int pixels, uint8_t* row) {
  for (int i = 0; i < pixels; ++i) {
    row[3 * i] = planes.red[i];
    row[3 * i + 1] = planes.green[i];
    row[3 * i + 2] = planes.blue[i];
  }
}

inline int luma_of(int red, int green, int blue) {
  return (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16;
}

// Pillow's Image.blend of two bytes.
inline uint8_t blended(int degenerate, int original, float factor) {
  float value = static_cast<float>(degenerate) + factor * static_cast<float>(original - degenerate);
  value = value > 0.0f ? value : 0.0f;
  value = value < 255.0f ? value : 255.0f;
  return static_cast<uint8_t>(static_cast<int>(value));
}

// C's round() of a number that is not negative and fits.
inline int rounded(double value) {
  const int whole = static_cast<int>(value);
  return whole + static_cast<int>(value - whole >= 0.5);
}

void look_up(const uint8_t* table, int64_t bytes, uint8_t* row) {
  for (int64_t i = 0; i < bytes; ++i) row[i] = table[row[i]];
}

void saturate(float factor, int pixels, uint8_t* row) {
  Planes p;
  for (; pixels > 0; pixels -= kColourBlock, row += 3 * kColourBlock) {
    const int count = pixels < kColourBlock ? pixels : kColourBlock;
    take_apart(row, count, p);
    for (int i = 0; i < count; ++i) {
      const int luma = luma_of(p.red[i], p.green[i], p.blue[i]);
      p.red[i] = blended(luma, p.red[i], factor);
      p.green[i] = blended(luma, p.green[i], factor);
      p.blue[i] = blended(luma, p.blue[i], factor);
    }
    put_together(p, count, row);
  }
}

uint64_t luma_sum(const uint8_t* row, int pixels) {
  Planes p;
  uint64_t total = 0;
  for (; pixels > 0; pixels -= kColourBlock, row += 3 * kColourBlock) {
    const int count = pixels < kColourBlock ? pixels : kColourBlock;
    take_apart(row, count, p);
    int sum = 0;
    for (int i = 0; i < count; ++i) sum += luma_of(p.red[i], p.green[i], p.blue[i]);
    total += static_cast<uint64_t>(sum);
  }
  return total;
}

// The hue byte, moved, and the saturation byte of each pixel, as int.
inline void to_hue(const Planes& p, int shift, int count, int* hues, int* saturations) {
  for (int i = 0; i < count; ++i) {
    const int red = p.red[i], green = p.green[i], blue = p.blue[i];
    int most = red > green ? red : green;
    most = most > blue ? most : blue;
    int least = red < green ? red : green;
    least = least < blue ? least : blue;
    const int range = most - least;
    const float divisor = static_cast<float>(range > 0 ? range : 1);
    const float value = static_cast<float>(most > 0 ? most : 1);
    const float saturation = static_cast<float>(range) / value;
    const float from_red = static_cast<float>(most - red) / divisor;
    const float from_green = static_cast<float>(most - green) / divisor;
    const float from_blue = static_cast<float>(most - blue) / divisor;
    const float if_red = from_blue - from_green;
    const float if_green = static_cast<float>(2.0 + double{from_red} - double{from_blue});
    const float if_blue = static_cast<float>(4.0 + double{from_green} - double{from_red});
    const float sixth = red == most ? if_red : green == most ? if_green : if_blue;
    const double turned = double{sixth} / 6.0 + 1.0;
    const float hue = static_cast<float>(turned >= 1.0 ? turned - 1.0 : turned);
    hues[i] = (static_cast<int>(double{hue} * 255.0) + shift) & 255;
    saturations[i] = static_cast<int>(double{saturation} * 255.0);
  }
}

inline void from_hue(const int* hues, const int* saturations, int count, Planes& p) {
  for (int i = 0; i < count; ++i) {
    int v = p.red[i] > p.green[i] ? p.red[i] : p.green[i];
    v = v > p.blue[i] ? v : p.blue[i];
    const double turned = static_cast<double>(hues[i]) * 6.0 / 255.0;
    const int sector = static_cast<int>(turned);
    const float f = static_cast<float>(turned - sector);
    const float fs = static_cast<float>(static_cast<double>(saturations[i]) / 255.0);
    const float fs_f = fs * f;
    const int a = rounded(v * (1.0 - double{fs}));
    const int b = rounded(v * (1.0 - double{fs_f}));
    const int c = rounded(v * (1.0 - fs * (1.0 - double{f})));
    // By masks: compilers make branches of chains of conditions.
    const auto is = [sector](int value) { return -static_cast<int>(sector == value); };
    const int is_0 = is(0) | is(6), is_1 = is(1), is_2 = is(2), is_3 = is(3), is_4 = is(4);
    const int is_5 = is(5);
    const int red = (v & (is_0 | is_5)) | (b & is_1) | (c & is_4) | (a & (is_2 | is_3));
    const int green = (v & (is_1 | is_2)) | (c & is_0) | (b & is_3) | (a & (is_4 | is_5));
    const int blue = (v & (is_3 | is_4)) | (c & is_2) | (b & is_5) | (a & (is_0 | is_1));
    p.red[i] = static_cast<uint8_t>(red);
    p.green[i] = static_cast<uint8_t>(green);
    p.blue[i] = static_cast<uint8_t>(blue);
  }
}

void turn_hue(int shift, int pixels, uint8_t* row) {
  Planes p;
  int hues[kColourBlock], saturations[kColourBlock];
  for (; pixels > 0; pixels -= kColourBlock, row += 3 * kColourBlock) {
    const int count = pixels < kColourBlock ? pixels : kColourBlock;
    take_apart(row, count, p);
    to_hue(p, shift, count, hues, saturations);
    from_hue(hues, saturations, count, p);
    put_together(p, count, row);
  }
}

// Pillow's kernel has eight weights of 1 / 13 around 5 / 13, in float32, plus a half. The sum is
// never close to an integer, so whole numbers give the same.
void sharpen(float factor, const uint8_t* above, const uint8_t* row, const uint8_t* below,
             int64_t bytes, uint8_t* out) {
  for (int64_t i = 0; i < bytes; ++i) {
    const int around = above[i - 3] + above[i] + above[i + 3] + row[i - 3] + row[i + 3] +
                       below[i - 3] + below[i] + below[i + 3];
    const int smooth = ((around + 5 * row[i] + 6) * 5042) >> 16;  // divided by 13, up to 3321
    out[i] = blended(smooth, row[i], factor);
  }
}

constexpr ColourKernels kKernels = {look_up, saturate, turn_hue, luma_sum, sharpen};

}  // namespace
}  // namespace stoker
