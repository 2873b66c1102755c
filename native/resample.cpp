#include "resample.hpp"

#include <algorithm>
#include <cstring>

#include "buffer.hpp"
#include "convert_kernels.hpp"
#include "resample_kernels.hpp"
#include "resample_tables.hpp"

namespace stoker {
namespace {

const ResampleKernels& kernels_of(SimdLevel level) {
#if defined(STOKER_X86)
  if (level == SimdLevel::avx512) return kResampleAvx512;
  if (level == SimdLevel::avx2) return kResampleAvx2;
#endif
  static_cast<void>(level);
  return kResampleScalar;
}

bool runs_vertical_first(const Resize& resize) {
  if (resize.height <= resize.out_height) return false;
  switch (resize.order) {
    case PassOrder::tall_vertical: return resize.height > int64_t{100} * resize.width;
    case PassOrder::cheaper_first:
      return resize.height - int64_t{resize.out_height} >
             2 * (resize.width - int64_t{resize.out_width});
    default: return false;
  }
}

size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace

struct Resampler::State {
  explicit State(SimdLevel simd) : level(simd), kernels(kernels_of(simd)) {}

  const SimdLevel level;
  const ResampleKernels& kernels;
  AxisCache x_cache, y_cache;
  // What was prepared.
  const AxisTable* x_table = nullptr;
  const AxisTable* y_table = nullptr;
  Filter filter = Filter::bilinear;
  bool vertical_first = false;
  bool flip_x = false;

  Buffer<uint32_t> ring;
  Buffer<uint8_t> middle, edge, row, convert_scratch;
  Buffer<const uint8_t*> row_pointers;
  Buffer<const uint32_t*> ring_pointers;

  void run(const uint8_t* pixels, ptrdiff_t stride, const uint8_t* readable_end,
           const Output& output);
  void copy_both();
  void pick_nearest();
  void horizontal_first();
  void vertical_first_or_alone();
  void emit(const uint8_t* finished, int y, bool mirror) {
    convert_unfenced(level, finished, 0, y, 1, mirror, converting, *target);
  }
  // Where a kernel may write row y of the result, with kRowSlack bytes to spare, and what makes of
  // it the row of the output. Dense interleaved bytes need no conversion: kernels write them in
  // place, and what spills into the rows below is overwritten later.
  uint8_t* place(int y) {
    return y < direct_rows ? static_cast<uint8_t*>(target->data) + y * target->stride : row.data();
  }
  void place_done(int y) {
    if (y >= direct_rows) emit(row.data(), y, false);
  }
  // Source row y (clamped to the last one) with `reach` readable bytes: itself, or a copy in `copy`
  // where that would read past the end.
  const uint8_t* source_row(int y, size_t reach, uint8_t* copy) const;

  // Of the run under way.
  const uint8_t* source = nullptr;
  ptrdiff_t source_stride = 0;
  const uint8_t* source_end = nullptr;
  const Output* target = nullptr;
  uint8_t* converting = nullptr;
  int direct_rows = 0;
};

const uint8_t* Resampler::State::source_row(int y, size_t reach, uint8_t* copy) const {
  const uint8_t* from = source + std::min(y, y_table->axis().extent - 1) * source_stride;
  const size_t readable = static_cast<size_t>(source_end - from);
  if (readable >= reach) return from;
  std::memcpy(copy, from, readable);
  return copy;
}

// Neither axis changes: the source rows are the result.
void Resampler::State::copy_both() {
  const size_t bytes = static_cast<size_t>(target->width) * 3;
  uint8_t* copy = row.need(bytes + kRowSlack);
  for (int y = 0; y < target->height; ++y) {
    emit(source_row(y, bytes + kRowSlack, copy), y, flip_x);
  }
}

void Resampler::State::pick_nearest() {
  const Axis& x_axis = x_table->axis();
  const Axis& y_axis = y_table->axis();
  uint8_t* out = row.need(static_cast<size_t>(target->width) * 3 + kRowSlack);
  for (int y = 0; y < target->height; ++y) {
    if (y == 0 || y_axis.first[y] != y_axis.first[y - 1]) {
      const uint8_t* from = source + y_axis.first[y] * source_stride;
      for (int x = 0; x < target->width; ++x) {
        std::memcpy(out + 3 * x, from + 3 * static_cast<ptrdiff_t>(x_axis.first[x]), 3);
      }
    }
    emit(out, y, false);
  }
}

// See Note [Passes].
void Resampler::State::horizontal_first() {
  const Axis& x_axis = x_table->axis();
  const Axis& y_axis = y_table->axis();
  const PackedAxis& x_packed = x_table->packed();
  const PackedAxis& y_packed = y_table->packed();
  const int bytes = 3 * target->width;
  const int interleave = kernels.interleave;
  const int batch = 4 / interleave;  // ring rows per call of the horizontal kernel
  const int ring_rows = static_cast<int>(round_up(y_packed.steps + batch - 1, batch));
  const size_t pitch = round_up(bytes, 64) + 16;
  uint32_t* rows_ring = ring.need(ring_rows * pitch);
  const uint32_t** inputs = ring_pointers.need(y_packed.steps);
  const size_t edge_pitch = round_up(x_packed.reach, 64);
  uint8_t* copies = edge.need(4 * edge_pitch);
  row.need(static_cast<size_t>(bytes) + 2 * kRowSlack);

  int next = 0;  // the first ring row that has not been computed; a multiple of batch
  for (int y = 0; y < target->height; ++y) {
    const int first = y_packed.offsets[y], count = y_packed.groups[y];
    next = std::max(next, first / batch * batch);
    for (; next < first + count; next += batch) {
      const uint8_t* rows[4];
      for (int i = 0; i < 4; ++i) {
        rows[i] = source_row(interleave * next + i, x_packed.reach, copies + i * edge_pitch);
      }
      uint32_t* outputs[4];
      const int slot = next % ring_rows;  // ring_rows is a multiple of batch: no wrap within
      for (int i = 0; i < batch; ++i) outputs[i] = rows_ring + (slot + i) * pitch;
      kernels.horizontal(x_axis, x_packed, rows, outputs);
    }
    for (int i = 0, slot = first % ring_rows; i < count; ++i) {
      inputs[i] = rows_ring + slot * pitch;
      if (++slot == ring_rows) slot = 0;
    }
    kernels.vertical_from_ring(y_axis, y_packed, y, inputs, bytes, place(y));
    place_done(y);
  }
}

// The vertical pass before the horizontal one, or one of them alone. Four output rows at a time.
void Resampler::State::vertical_first_or_alone() {
  const Axis& x_axis = x_table->axis();
  const Axis& y_axis = y_table->axis();
  const PackedAxis& x_packed = x_table->packed();
  const PackedAxis& y_packed = y_table->packed();
  const int bytes = 3 * target->width;
  const int source_bytes = 3 * x_axis.extent;
  const int interleave = kernels.interleave;
  const size_t ring_pitch = round_up(bytes, 64) + 16;
  uint32_t* rows_ring = ring.need(4 * ring_pitch);
  const size_t pitch = round_up(std::max(x_packed.reach, source_bytes + 2 * kRowSlack), 64);
  uint8_t* between = middle.need(4 * pitch);
  const uint8_t** inputs = row_pointers.need(static_cast<size_t>(interleave) * y_packed.steps);
  row.need(static_cast<size_t>(bytes) + 2 * kRowSlack);
  uint32_t* outputs[4];
  for (int i = 0; i < 4 / interleave; ++i) outputs[i] = rows_ring + i * ring_pitch;

  for (int top = 0; top < target->height; top += 4) {
    const int height = std::min(4, target->height - top);
    const uint8_t* rows[4];
    for (int i = 0; i < 4; ++i) {
      uint8_t* finished = between + i * pitch;
      if (y_axis.identity) {
        rows[i] = source_row(std::min(top + i, target->height - 1), x_packed.reach, finished);
        continue;
      }
      rows[i] = finished;
      if (i >= height) continue;
      const int y = top + i;
      for (int t = 0; t < interleave * y_packed.groups[y]; ++t) {
        inputs[t] = source + std::min(y_axis.first[y] + t, y_axis.extent - 1) * source_stride;
      }
      kernels.vertical_from_source(y_axis, y_packed, y, inputs, source_bytes, finished);
    }
    if (x_axis.identity) {
      for (int i = 0; i < height; ++i) emit(rows[i], top + i, flip_x);
      continue;
    }
    kernels.horizontal(x_axis, x_packed, rows, outputs);
    for (int i = 0; i < height; ++i) {
      kernels.extract(outputs[i / interleave], i % interleave, bytes, place(top + i));
      place_done(top + i);
    }
  }
}

void Resampler::State::run(const uint8_t* pixels, ptrdiff_t stride, const uint8_t* readable_end,
                           const Output& output) {
  source = pixels;
  source_stride = stride;
  source_end = readable_end;
  target = &output;
  converting = convert_scratch.need(static_cast<size_t>(output.width) * 3 + 2 * kRowSlack);
  direct_rows = 0;
  if (output.conversion->format == PixelFormat::u8_hwc && output.conversion->channels == 3 &&
      !output.gray && !output.flip_y && output.stride == ptrdiff_t{3} * output.width) {
    const int spilled = static_cast<int>((kRowSlack + output.stride - 1) / output.stride);
    direct_rows = std::max(output.height - spilled, 0);
  }
  const bool x_identity = x_table->axis().identity, y_identity = y_table->axis().identity;
  if (x_identity && y_identity) {
    copy_both();
  } else if (filter == Filter::nearest) {
    pick_nearest();
  } else if (vertical_first || x_identity || y_identity) {
    vertical_first_or_alone();
  } else {
    horizontal_first();
  }
  fence_rows();  // see Note [Streaming stores]
}

Resampler::Resampler(SimdLevel level) : state_(std::make_unique<State>(level)) {}
Resampler::~Resampler() = default;
Resampler::Resampler(Resampler&&) noexcept = default;
Resampler& Resampler::operator=(Resampler&&) noexcept = default;

Rect Resampler::prepare(const Resize& resize) {
  State& state = *state_;
  const Rect& window = resize.window;
  const AxisSpec x_spec = {resize.width, resize.out_width, window.x,
                           window.width, resize.flip_x,    resize.filter};
  const AxisSpec y_spec = {resize.height, resize.out_height, window.y, window.height,
                           false,         resize.filter};
  state.filter = resize.filter;
  state.flip_x = resize.flip_x;
  state.vertical_first = runs_vertical_first(resize);
  const bool from_source = state.vertical_first || resize.width == resize.out_width;
  state.x_table = &state.x_cache.find(x_spec, AxisUse::horizontal, state.kernels);
  state.y_table = &state.y_cache.find(
      y_spec, from_source ? AxisUse::vertical_from_source : AxisUse::vertical_from_ring,
      state.kernels);
  const Axis& x_axis = state.x_table->axis();
  const Axis& y_axis = state.y_table->axis();
  return {x_axis.origin, y_axis.origin, x_axis.extent, y_axis.extent};
}

void Resampler::run(const uint8_t* pixels, ptrdiff_t stride, const uint8_t* readable_end,
                    const Output& output) {
  state_->run(pixels, stride, readable_end, output);
}

}  // namespace stoker
