// What decoder.cpp hands to the code of one SIMD level: one region of one scan, with its tables and
// scratch. Plain structures only: the files compiled for wider instruction sets include this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "geometry.hpp"
#include "jpeg/huffman.hpp"
#include "jpeg/markers.hpp"
#include "status.hpp"

namespace stoker::jpeg {

// Zeros behind the entropy-coded bytes. An MCU of 6 blocks can take at most 6 x (27 + 63 x 31) bits
// = 1.5 KB, and the reader checks its position once per MCU, so it never leaves them.
constexpr size_t kScanPadding = 4096;
// MCUs that are decoded before their blocks are transformed; even, so that blocks pair up.
constexpr int kStripMcus = 16;
// Coefficients of one strip, and one slot for what is written past the last block.
constexpr size_t kStripCoefficients = (size_t{kStripMcus} * 6 + 1) * 64;
// Bytes that kernels may touch around a line of samples.
constexpr size_t kLineSlack = 64;

struct Quant {
  alignas(64) int16_t factor[64];
  // Largest |coefficient| whose product with the factor stays within kMaxProduct.
  alignas(64) uint16_t limit[64];
};

// Note [Product limit]
// Within 8191 every SIMD version of libjpeg-turbo and ours agree. Beyond it 16-bit steps of the
// transform overflow in ways that depend on the processor, so the file is declined. Sound files
// stay below 1200.
constexpr int kMaxProduct = 8191;

// A line of samples is kept for two MCU rows where chroma is halved vertically, because the last
// line of one needs the first of the next; the number of lines is a power of two, and line y lives
// at y modulo that number.
struct Plane {
  uint8_t* data;  // kLineSlack bytes before and after each line may be touched
  size_t stride;
  int lines;
};

struct Scan {
  const Frame* frame;
  const uint8_t* bytes;  // from the first entropy-coded byte to the end of the file
  size_t size;
  const DcTable* dc[3];
  const AcTable* ac[3];
  const Quant* quant;  // one per component

  Rect region;
  uint8_t* pixels;
  ptrdiff_t stride;
  int x0, x1, y0, y1;  // the MCUs that the region needs

  // Scratch.
  uint8_t* stream;     // size + kScanPadding bytes: the entropy-coded bytes without stuffing
  uint32_t* segments;  // max_segments + 1 offsets into it
  size_t max_segments;
  int16_t* coefficients;  // kStripCoefficients
  Plane plane[3];
  uint8_t* upsampled[2];  // a line of full-width chroma each, with slack like a plane's
};

// Decodes scan.region. One function per level; every level gives the same status and the same
// bytes.
Status decode_scan_scalar(const Scan& scan);
Status decode_scan_avx2(const Scan& scan);
Status decode_scan_avx512(const Scan& scan);

}  // namespace stoker::jpeg
