// The reference kernels: one tap at a time, ring rows of plain bytes.
#include <algorithm>
#include <cstring>

#include "resample_kernels.hpp"

namespace stoker {
namespace {

constexpr int32_t kHalf = 1 << (kWeightBits - 1);

uint8_t finish(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kWeightBits, 0, 255)); }

const int32_t* weights_of(const Axis& axis, int output) {
  return axis.weights + static_cast<size_t>(output) * axis.pitch;
}

void layout(const Axis& axis, AxisUse use, PackedAxis& packed) {
  packed.steps = axis.longest;
  packed.reach = 3 * axis.extent;
  packed.offset_count = use == AxisUse::horizontal ? 0 : axis.count;
}

void pack(const Axis& axis, AxisUse use, PackedAxis& packed, uint8_t*) {
  if (use == AxisUse::horizontal) return;
  std::copy_n(axis.first, axis.count, packed.offsets);
  std::copy_n(axis.taps, axis.count, packed.groups);
}

void horizontal(const Axis& axis, const PackedAxis&, const uint8_t* const* rows,
                uint32_t* const* ring) {
  for (int r = 0; r < 4; ++r) {
    uint8_t* out = reinterpret_cast<uint8_t*>(ring[r]);
    for (int x = 0; x < axis.count; ++x, out += 3) {
      const uint8_t* from = rows[r] + 3 * static_cast<ptrdiff_t>(axis.first[x]);
      const int32_t* weights = weights_of(axis, x);
      int32_t red = kHalf, green = kHalf, blue = kHalf;
      for (int t = 0; t < axis.taps[x]; ++t, from += 3) {
        red += from[0] * weights[t];
        green += from[1] * weights[t];
        blue += from[2] * weights[t];
      }
      out[0] = finish(red);
      out[1] = finish(green);
      out[2] = finish(blue);
    }
  }
}

void vertical_from_source(const Axis& axis, const PackedAxis&, int y, const uint8_t* const* rows,
                          int bytes, uint8_t* out) {
  const int32_t* weights = weights_of(axis, y);
  for (int i = 0; i < bytes; ++i) {
    int32_t sum = kHalf;
    for (int t = 0; t < axis.taps[y]; ++t) sum += rows[t][i] * weights[t];
    out[i] = finish(sum);
  }
}

void vertical_from_ring(const Axis& axis, const PackedAxis&, int y, const uint32_t* const* ring,
                        int bytes, uint8_t* out) {
  const int32_t* weights = weights_of(axis, y);
  for (int i = 0; i < bytes; ++i) {
    int32_t sum = kHalf;
    for (int t = 0; t < axis.taps[y]; ++t) {
      sum += reinterpret_cast<const uint8_t*>(ring[t])[i] * weights[t];
    }
    out[i] = finish(sum);
  }
}

void extract(const uint32_t* ring, int, int bytes, uint8_t* out) { std::memcpy(out, ring, bytes); }

}  // namespace

extern const ResampleKernels kResampleScalar;
const ResampleKernels kResampleScalar = {
    1, build_weights, layout, pack, horizontal, vertical_from_ring, vertical_from_source, extract};

}  // namespace stoker
