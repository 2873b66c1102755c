// Pillow's 8-bit antialiased resize, bit for bit, computing only the wanted window of the output,
// fused with flips and the conversion to the tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "convert.hpp"
#include "geometry.hpp"
#include "simd.hpp"

namespace stoker {

enum class Filter : uint8_t { nearest, box, bilinear, hamming, bicubic, lanczos };

// Which pass Pillow runs first; it depends on its version, and Python probes the installed one.
enum class PassOrder : uint8_t {
  horizontal_first,  // always
  tall_vertical,     // vertical first where height > 100 * width and the height shrinks
  // vertical first where the height shrinks and height - out_height > 2 * (width - out_width)
  cheaper_first,
};

struct Resize {
  int width = 0, height = 0;          // of the image to resize (the crop, in crop-then-resize)
  int out_width = 0, out_height = 0;  // of the whole result
  Rect window;                        // the part of the result that is wanted (before the flips)
  bool flip_x = false;                // mirror the window left to right
  Filter filter = Filter::bilinear;
  PassOrder order = PassOrder::cheaper_first;
};

// One thread's resampler: owns its tables and scratch, allocates nothing in steady state.
class Resampler {
 public:
  explicit Resampler(SimdLevel level);
  ~Resampler();
  Resampler(Resampler&&) noexcept;
  Resampler& operator=(Resampler&&) noexcept;

  // Builds the tables and returns the part of the image that the window needs.
  // Sizes are positive and the window lies inside the result (the caller checks). Throws
  // std::bad_alloc.
  Rect prepare(const Resize& resize);

  // Runs what was prepared. `pixels` is the pixel at (needed.x, needed.y), interleaved RGB;
  // `readable_end` is one past the last readable byte (at least the end of the last needed row;
  // kernels never read beyond it). output.width and height are the window's.
  void run(const uint8_t* pixels, ptrdiff_t stride, const uint8_t* readable_end,
           const Output& output);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace stoker
