// From finished uint8 RGB rows to the tensor's memory: layout, floats, normalisation.
//
// The tail of a transform (ToTensor, ToDtype, Normalize ...) maps each of 256 byte values per
// channel to one value, so a table of 3 x 256 values, computed by the user's own transform, defines
// it exactly. Formulas are shortcuts, taken only when they give the table's bits for all 768
// inputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.hpp"

namespace stoker {

enum class PixelFormat : uint8_t {
  u8_hwc,   // interleaved RGB bytes (intermediate images, and NHWC output)
  u8_chw,   // planar bytes
  f32_chw,  // planar float32
  u16_chw,  // planar 16-bit patterns: float16 or bfloat16, by table
};

struct Conversion {
  enum class Formula : uint8_t {
    table,     // look up
    divide,    // v1: x / 255, - mean, / std: two-term reciprocals, 5 operations
    multiply,  // v2: x * float32(1/255), - mean, / std
  };
  PixelFormat format = PixelFormat::u8_hwc;
  Formula formula = Formula::table;
  int channels = 3;  // or 1: only the first is written (gray images carry equal channels)
  float mean[3] = {0, 0, 0};
  float reciprocal_high[3] = {1, 1, 1}, reciprocal_low[3] = {0, 0, 0};  // 1 / std in two floats
  alignas(64) float table_f32[3][256];
  alignas(64) uint16_t table_u16[3][256];
  // The same table split by byte: table_bytes[c][k] holds byte k (least significant first) of every
  // entry of channel c.
  alignas(64) uint8_t table_bytes[3][4][256];
};

// table: 3 x 256 float32. mean and std (3 floats, or null for 0 and 1) are hints for the formulas;
// the table alone decides. Sets the format to f32_chw.
void set_table(Conversion& conversion, const float* table, const float* mean, const float* std);
// table: 3 x 256 16-bit patterns. Sets the format to u16_chw.
void set_table(Conversion& conversion, const uint16_t* table);

// Where finished rows go. `data` is the first byte of the output image.
struct Output {
  const Conversion* conversion = nullptr;
  void* data = nullptr;
  int width = 0, height = 0;  // of the output
  ptrdiff_t stride = 0;       // bytes between rows; used by u8_hwc only, planar rows are dense
  bool flip_y = false;        // row y is written at height - 1 - y
  bool gray = false;          // replace each pixel by Pillow's luma before converting:
                              // L = (19595 R + 38470 G + 7471 B + 32768) >> 16, all channels = L
};

constexpr int kRowSlack = 64;  // bytes readable past the end of a row handed to a kernel

// Converts `rows` rows of output.width interleaved RGB pixels that start at row y of the output.
// source: stride bytes between rows, kRowSlack bytes readable after the last row; not changed.
// flip_x: the row is written mirrored. scratch: width * 3 + 2 * kRowSlack bytes, needed for gray
// and flip_x.
void convert_rows(SimdLevel level, const uint8_t* source, ptrdiff_t stride, int y, int rows,
                  bool flip_x, uint8_t* scratch, const Output& output);

}  // namespace stoker
