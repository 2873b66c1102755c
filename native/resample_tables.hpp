// The weights of one axis of a resize, as Pillow computes them, and a cache of them. Internal to
// resample*.cpp.
#pragma once

#include <cstdint>

#include "buffer.hpp"
#include "resample.hpp"

namespace stoker {

constexpr int kWeightBits = 22;  // weights are integers that add up to about 1 << kWeightBits

// Everything that the weights of one axis depend on.
struct AxisSpec {
  int size = 0, out_size = 0;  // of the image and of the whole result along this axis
  int begin = 0, count = 0;    // the wanted outputs
  bool mirrored = false;       // the wanted outputs in descending order
  Filter filter = Filter::bilinear;
  bool operator==(const AxisSpec&) const = default;
};

// Source positions and weights per output. The memory belongs to AxisTable.
struct Axis {
  int count = 0;
  int origin = 0, extent = 0;   // the source positions [origin, origin + extent) carry all weight
  int longest = 0;              // most taps of any output
  int pitch = 0;                // weights per output, a multiple of 4; those past the taps are 0
  bool identity = false;        // the sizes are equal: the pass copies. Only `first` is filled.
  bool signed_weights = false;  // sums may leave 0..255 and need clipping
  int32_t* first = nullptr;     // [count], counted from origin
  int32_t* taps = nullptr;      // [count]
  int32_t* weights = nullptr;   // [count][pitch]
};

// The filter stretched to the scale of one axis.
struct AxisPlan {
  double scale, support, inverse_stretch;
};

// The same weights in the layout of one instruction set's kernels (see there).
struct PackedAxis {
  int steps = 0;      // most groups of taps of any output
  bool wide = false;  // AVX-512: neighbouring outputs lie too far apart to share a load
  int reach = 0;      // bytes from the start of a row that the horizontal kernel may read
  size_t offset_count = 0, weight_count = 0, shuffle_count = 0;  // sizes of the arrays
  int32_t* offsets = nullptr;  // horizontal: first byte; vertical: first ring row
  int32_t* groups = nullptr;   // vertical: groups of taps per output
  int32_t* weights = nullptr;
  uint8_t* shuffles = nullptr;
};

// How an axis is used.
enum class AxisUse : uint8_t {
  horizontal,
  vertical_from_ring,    // the rows come from the horizontal pass, interleaved in ring rows
  vertical_from_source,  // the rows are the image's own
};

struct ResampleKernels;

struct TableScratch {
  Buffer<double> weights;
  Buffer<uint8_t> bytes;
};

// The tables of one axis and the memory they live in.
class AxisTable {
 public:
  void build(const AxisSpec& spec, AxisUse use, const ResampleKernels& kernels,
             TableScratch& scratch);
  const Axis& axis() const { return axis_; }
  const PackedAxis& packed() const { return packed_; }

 private:
  void build_positions(const AxisSpec& spec);
  void pack(AxisUse use, const ResampleKernels& kernels, TableScratch& scratch);

  Axis axis_;
  PackedAxis packed_;
  Buffer<int32_t> first_, taps_, weights_, offsets_, groups_, packed_weights_;
  Buffer<uint8_t> shuffles_;
};

// A few recent tables. A table that is asked for twice in a row is kept; one that is asked for once
// is overwritten by the next, so that random crops work in the same warm memory all the time.
class AxisCache {
 public:
  // Valid until the next call.
  const AxisTable& find(const AxisSpec& spec, AxisUse use, const ResampleKernels& kernels);

 private:
  static constexpr int kSlots = 8;
  struct Slot {
    AxisSpec spec;
    AxisUse use = AxisUse::horizontal;
    uint64_t last_hit = 0;
    AxisTable table;
  };
  Slot slots_[kSlots];
  int candidate_ = 0;  // the slot that the next miss overwrites
  uint64_t clock_ = 0;
  TableScratch scratch_;
};

}  // namespace stoker
