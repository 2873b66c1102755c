#include "resample_tables.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>

#include "resample_kernels.hpp"

namespace stoker {
namespace {

// Every operation below is a double operation in Pillow's order: the integer weights depend on the
// last bit. Hamming's constants are single precision there.

double box(double x) { return x > -0.5 && x <= 0.5 ? 1.0 : 0.0; }

double triangle(double x) {
  x = std::fabs(x);
  return x < 1.0 ? 1.0 - x : 0.0;
}

double hamming(double x) {
  x = std::fabs(x);
  if (x == 0.0) return 1.0;
  if (x >= 1.0) return 0.0;
  x *= std::numbers::pi;
  return std::sin(x) / x * (0.54f + 0.46f * std::cos(x));
}

double cubic(double x) {
  constexpr double a = -0.5;
  x = std::fabs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
  if (x < 2.0) return (((x - 5) * x + 8) * x - 4) * a;
  return 0.0;
}

double sinc(double x) {
  if (x == 0.0) return 1.0;
  x *= std::numbers::pi;
  return std::sin(x) / x;
}

double lanczos(double x) { return x >= -3.0 && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0; }

double filter_support(Filter filter) {
  switch (filter) {
    case Filter::box: return 0.5;
    case Filter::bicubic: return 2.0;
    case Filter::lanczos: return 3.0;
    default: return 1.0;
  }
}

template <class Function>
void build_with(Function function, const AxisSpec& spec, const AxisPlan& plan, Axis& axis,
                double* work) {
  for (int i = 0; i < spec.count; ++i) {
    const double center = (spec.begin + i + 0.5) * plan.scale;
    int low = std::max(static_cast<int>(center - plan.support + 0.5), 0);
    int taps = std::min(static_cast<int>(center + plan.support + 0.5), spec.size) - low;
    double sum = 0.0;
    for (int t = 0; t < taps; ++t) {
      work[t] = function((t + low - center + 0.5) * plan.inverse_stretch);
      sum += work[t];
    }
    const int slot = spec.mirrored ? spec.count - 1 - i : i;
    int32_t* weights = axis.weights + static_cast<size_t>(slot) * axis.pitch;
    for (int t = 0; t < taps; ++t) {
      const double weight = (sum != 0.0 ? work[t] / sum : work[t]) * (1 << kWeightBits);
      weights[t] = static_cast<int32_t>(weight + (weight < 0 ? -0.5 : 0.5));
    }
    // Weights that rounded to zero at either end contribute nothing.
    int skipped = 0;
    while (skipped < taps - 1 && weights[skipped] == 0) ++skipped;
    while (taps > skipped + 1 && weights[taps - 1] == 0) --taps;
    taps -= skipped;
    if (skipped > 0) std::memmove(weights, weights + skipped, sizeof(int32_t) * taps);
    std::memset(weights + taps, 0, sizeof(int32_t) * (axis.pitch - taps));
    axis.first[slot] = low + skipped;
    axis.taps[slot] = taps;
  }
}

}  // namespace

void build_weights(const AxisSpec& spec, const AxisPlan& plan, Axis& axis, double* work) {
  switch (spec.filter) {
    case Filter::box: build_with(box, spec, plan, axis, work); break;
    case Filter::hamming: build_with(hamming, spec, plan, axis, work); break;
    case Filter::bicubic: build_with(cubic, spec, plan, axis, work); break;
    case Filter::lanczos: build_with(lanczos, spec, plan, axis, work); break;
    default: build_with(triangle, spec, plan, axis, work);
  }
}

// One tap of full weight per output: nearest, and any filter where the sizes are equal.
void AxisTable::build_positions(const AxisSpec& spec) {
  axis_.longest = 1;
  // Pillow walks the source in steps of `scale`, adding up; the sum differs from a product.
  const double scale = static_cast<double>(spec.size) / spec.out_size;
  double position = 0.5 * scale;
  for (int i = 0; i < spec.begin; ++i) position += scale;
  for (int i = 0; i < spec.count; ++i, position += scale) {
    const int slot = spec.mirrored ? spec.count - 1 - i : i;
    axis_.first[slot] = std::min(static_cast<int>(position), spec.size - 1);
    axis_.taps[slot] = 1;
  }
}

void AxisTable::build(const AxisSpec& spec, AxisUse use, const ResampleKernels& kernels,
                      TableScratch& scratch) {
  axis_.count = spec.count;
  axis_.identity = spec.size == spec.out_size;
  axis_.signed_weights = spec.filter == Filter::bicubic || spec.filter == Filter::lanczos;
  // The SIMD builder works on four outputs at a time.
  const size_t slots = static_cast<size_t>(spec.count) + 4;
  axis_.first = first_.need(slots);
  axis_.taps = taps_.need(slots);
  const bool positions_only = axis_.identity || spec.filter == Filter::nearest;
  if (positions_only) {
    axis_.pitch = 0;
    build_positions(spec);
  } else {
    const double scale = static_cast<double>(spec.size) / spec.out_size;
    const double stretch = std::max(scale, 1.0);
    const double support = filter_support(spec.filter) * stretch;
    const AxisPlan plan = {scale, support, 1.0 / stretch};
    const int most_taps = std::min(static_cast<int>(std::ceil(support)) * 2 + 1, spec.size);
    axis_.pitch = (most_taps + 3) & ~3;
    axis_.weights = weights_.need(slots * axis_.pitch + 16);
    double* work = scratch.weights.need(4 * static_cast<size_t>(axis_.pitch) + 16);
    kernels.build(spec, plan, axis_, work);
  }
  int low = axis_.first[0], high = low, longest = 1;
  for (int i = 0; i < spec.count; ++i) {
    low = std::min(low, axis_.first[i]);
    high = std::max(high, axis_.first[i] + axis_.taps[i]);
    longest = std::max(longest, axis_.taps[i]);
  }
  for (int i = 0; i < spec.count; ++i) axis_.first[i] -= low;
  axis_.origin = low;
  axis_.extent = high - low;
  axis_.longest = longest;
  packed_ = {};
  if (!positions_only) pack(use, kernels, scratch);
}

void AxisTable::pack(AxisUse use, const ResampleKernels& kernels, TableScratch& scratch) {
  kernels.layout(axis_, use, packed_);
  packed_.offsets = offsets_.need(packed_.offset_count);
  packed_.groups = groups_.need(packed_.offset_count);
  packed_.weights = packed_weights_.need(packed_.weight_count);
  packed_.shuffles = shuffles_.need(packed_.shuffle_count);
  const size_t bytes = 3 * (static_cast<size_t>(axis_.count) * axis_.pitch + 64);
  kernels.pack(axis_, use, packed_, scratch.bytes.need(bytes));
}

const AxisTable& AxisCache::find(const AxisSpec& spec, AxisUse use,
                                 const ResampleKernels& kernels) {
  ++clock_;
  for (int i = 0; i < kSlots; ++i) {
    Slot& slot = slots_[i];
    if (!(slot.spec == spec) || slot.use != use) continue;
    slot.last_hit = clock_;
    if (i == candidate_) {
      // Keep it; the table that was used longest ago makes room.
      for (int k = 0; k < kSlots; ++k) {
        if (slots_[k].last_hit < slots_[candidate_].last_hit) candidate_ = k;
      }
    }
    return slot.table;
  }
  Slot& slot = slots_[candidate_];
  slot.spec = AxisSpec{};  // matches nothing while the table is being changed
  slot.table.build(spec, use, kernels, scratch_);
  slot.spec = spec;
  slot.use = use;
  slot.last_hit = clock_;
  return slot.table;
}

}  // namespace stoker
