// Baseline JPEG to interleaved RGB, bit-identical to libjpeg-turbo's defaults (accurate integer
// IDCT, fancy upsampling), decoding only the blocks that a region needs. Declines whatever it
// cannot reproduce exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "geometry.hpp"
#include "simd.hpp"
#include "status.hpp"

namespace stoker::jpeg {

struct Header {
  int width = 0, height = 0;
  bool gray = false;
};

struct Limits {
  int64_t max_pixels = int64_t{1} << 40;  // above: Status::unsupported (Pillow warns or refuses)
  bool upright = false;  // Status::oriented unless EXIF and XMP leave the image as it is
};

// One thread's decoder: owns its tables and scratch, allocates nothing in steady state.
// All input bytes are hostile: any input gives a status, and no read or write leaves the given
// memory.
class Decoder {
 public:
  explicit Decoder(SimdLevel level);
  ~Decoder();
  Decoder(Decoder&&) noexcept;
  Decoder& operator=(Decoder&&) noexcept;

  // Parses everything before the entropy-coded data. `data` stays owned by the caller and must
  // outlive decode().
  Status open(const uint8_t* data, size_t size, const Limits& limits);
  const Header& header() const;

  // Decodes `region` (inside the image, not empty) into `pixels`: region.height rows of
  // region.width * 3 bytes, `stride` bytes apart (>= region.width * 3). Bytes between rows and up
  // to kRowSlack bytes after the last row may be overwritten. Rows below the region are not
  // decoded, but the scan must end in an end-of-image marker, else Status::truncated. Anything but
  // Status::ok leaves `pixels` undefined.
  Status decode(const Rect& region, uint8_t* pixels, ptrdiff_t stride);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stoker::jpeg
