// What the resampler asks of one instruction set. Internal to resample*.cpp.
//
// Note [Passes]: the horizontal kernel takes four rows of pixels at a time and writes ring rows of
// 3 * count dwords. A ring row interleaves `interleave` rows, so that the vertical kernel
// multiplies that many taps by one instruction: 1 row (scalar, a byte per value), 2 rows (AVX2, 16
// bits each) or 4 rows (AVX-512, a byte each). Where Pillow runs the vertical pass first, it reads
// the image's rows, and the horizontal kernel's ring rows are taken apart again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "resample_tables.hpp"

namespace stoker {

struct ResampleKernels {
  int interleave;
  // build_weights() or its equal.
  void (*build)(const AxisSpec& spec, const AxisPlan& plan, Axis& axis, double* work);
  // Sets everything in `packed` but the pointers.
  void (*layout)(const Axis& axis, AxisUse use, PackedAxis& packed);
  // Fills the arrays. work: 3 * (count * pitch + 64) bytes.
  void (*pack)(const Axis& axis, AxisUse use, PackedAxis& packed, uint8_t* work);

  // Four rows, each readable for packed.reach bytes, to 4 / interleave ring rows.
  void (*horizontal)(const Axis& axis, const PackedAxis& packed, const uint8_t* const* rows,
                     uint32_t* const* ring);
  // Output y from packed.groups[y] ring rows to `bytes` bytes; writes up to kRowSlack more.
  void (*vertical_from_ring)(const Axis& axis, const PackedAxis& packed, int y,
                             const uint32_t* const* ring, int bytes, uint8_t* out);
  // Output y from interleave * packed.groups[y] rows, reading `bytes` bytes of each; writes up to
  // kRowSlack more.
  void (*vertical_from_source)(const Axis& axis, const PackedAxis& packed, int y,
                               const uint8_t* const* rows, int bytes, uint8_t* out);
  // Row `index` of the interleaved ones; writes up to kRowSlack bytes more.
  void (*extract)(const uint32_t* ring, int index, int bytes, uint8_t* out);
};

// Fills first (absolute), taps and weights. work: 4 * pitch + 16 doubles.
void build_weights(const AxisSpec& spec, const AxisPlan& plan, Axis& axis, double* work);

extern const ResampleKernels kResampleScalar;
#if defined(STOKER_X86)
void build_weights_avx2(const AxisSpec& spec, const AxisPlan& plan, Axis& axis, double* work);
extern const ResampleKernels kResampleAvx2;
extern const ResampleKernels kResampleAvx512;
#endif

}  // namespace stoker
