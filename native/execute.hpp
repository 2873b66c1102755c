// One sample from encoded bytes (or decoded pixels) to its place in the batch, on the calling
// thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "buffer.hpp"
#include "jpeg/decoder.hpp"
#include "pixels.hpp"
#include "plan.hpp"
#include "resample.hpp"

namespace stoker {

// One thread's tools and scratch. Allocates nothing in steady state. Never throws: out of memory is
// a status.
class Executor {
 public:
  explicit Executor(SimdLevel level);

  // Decodes `data` (a JPEG, hostile) and runs the plan; writes the tensor of height x width pixels
  // to `out`. Status::bad_geometry where the plan's result has another size. On failure `out` is
  // undefined.
  Status run_encoded(const Plan& plan, const jpeg::Limits& limits, const uint8_t* data, size_t size,
                     uint32_t key, int height, int width, void* out);

  // The same from finished RGB pixels (image_height dense or strided rows); nothing beyond the last
  // row is read.
  Status run_pixels(const Plan& plan, const uint8_t* pixels, ptrdiff_t stride, int image_height,
                    int image_width, uint32_t key, int height, int width, void* out);

  // Size of an encoded image from its header; anything but Status::ok where the decoder declines
  // it.
  Status size(const jpeg::Limits& limits, const uint8_t* data, size_t size, int& height,
              int& width);

  // File bytes of the sample at hand (reader.hpp fills it).
  Buffer<uint8_t>& file() { return file_; }

 private:
  Status geometry(const Plan& plan, int image_height, int image_width, uint32_t key, int height,
                  int width);
  bool fused(const Step& step, int index) const;
  Status finish(const Plan& plan, View view, void* out);
  void erase(const Plan& plan, void* out) const;

  SimdLevel level_;
  jpeg::Decoder decoder_;
  Resampler resampler_;
  Generator generator_;
  Steps steps_;
  Rect regions_[kMaxSteps + 1];  // regions_[i]: what is needed of the image before step i
  int widths_[kMaxSteps + 1], heights_[kMaxSteps + 1];
  int last_ = -1;      // the last step that is not fused into the conversion
  int prepared_ = -1;  // the resize that the resampler is prepared for
  Buffer<uint8_t> file_, image_, spare_, line_;
};

}  // namespace stoker
