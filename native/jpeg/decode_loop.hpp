// From entropy-coded bytes to pixels. Included once per SIMD level, whose file defines the Kernels
// before; everything here is in an anonymous namespace so that code for one instruction set never
// stands in for another's.
//
// bytes --unstuff--> stream --entropy--> a strip of blocks --transform--> lines of samples
// --upsample, colour--> pixels
//
// Blocks outside the region's MCUs are skipped in the entropy decoder: their codes are walked, for
// the position in the stream and the DC predictors, and nothing else is done.
#pragma once

#include <cstring>

#include "jpeg/scan.hpp"

namespace stoker::jpeg {
namespace {

inline int smaller(int a, int b) { return a < b ? a : b; }
inline int larger(int a, int b) { return a > b ? a : b; }

// What walking the bytes up to the end-of-image marker found. Segments are what restart markers
// divide a scan into.
struct Stream {
  const uint8_t* data;
  const uint32_t* starts;  // of the segments, and the end of the last one
  size_t segments;
};

// Copies the entropy-coded bytes without stuffed zeros and restart markers. The markers must be in
// order and the scan must end in an end-of-image marker, without which Pillow would refuse the
// file.
template <class Kernels>
Status unstuff(const Scan& scan, Stream& stream) {
  const uint8_t* in = scan.bytes;
  const uint8_t* const end = in + scan.size;
  uint8_t* out = scan.stream;
  size_t segments = 0;
  scan.segments[0] = 0;
  for (;;) {
    Kernels::copy_until_ff(in, end, out);
    // Note [Fill bytes]
    // FF may be repeated before a marker. Before a stuffed zero that is an error which libjpeg
    // doesn't report: its fast decoder takes it for a marker, its slow one repeats the MCU on top
    // of the coefficients that the fast one left.
    bool filled = false;
    for (; end - in >= 2 && in[1] == 0xFF; in++) filled = true;
    if (end - in < 2) return Status::truncated;
    const int marker = in[1];
    in += 2;
    if (marker == 0) {
      if (filled) return Status::corrupt;
      *out++ = 0xFF;
    } else if (marker == 0xD9) {
      break;
    } else if (marker >= 0xD0 && marker <= 0xD7) {
      if (!scan.frame->restart_interval || marker != 0xD0 + int(segments & 7) ||
          segments + 1 >= scan.max_segments)
        return Status::corrupt;
      scan.segments[++segments] = uint32_t(out - scan.stream);
    } else {
      return Status::corrupt;
    }
  }
  scan.segments[++segments] = uint32_t(out - scan.stream);
  std::memset(out, 0, kScanPadding);
  stream = {scan.stream, scan.segments, segments};
  return Status::ok;
}

// Everything needed to continue at some MCU: the position in the stream and the predictors.
// `Entropy` is the level's decoder of blocks. It has seek(bit) and position(); decode(dc, ac,
// block, prediction), which fills a block and returns how many zigzag positions may be nonzero, or
// 0 on an error; and skip(dc, ac, prediction), which returns false on an error.
template <class Entropy>
class Reader {
 public:
  Reader(const Scan& scan, const Stream& stream)
      : scan_(scan),
        stream_(stream),
        luma_(scan.frame->max_h * scan.frame->max_v),
        color_(scan.frame->components == 3),
        left_(scan.frame->restart_interval) {
    entropy_.open(stream.data);
    entropy_.seek(0);
  }

  // Decodes `count` MCUs into consecutive blocks. used: one byte per block, what Entropy::decode
  // gave.
  bool decode(int count, int16_t* blocks, uint8_t* used) {
    return color_ ? walk<true, true>(count, blocks, used) : walk<false, true>(count, blocks, used);
  }

  // Walks over `count` MCUs. With an index of rows, setting the position and the predictors would
  // take its place.
  bool skip(int count) {
    if (count <= 0) return true;
    return color_ ? walk<true, false>(count, nullptr, nullptr)
                  : walk<false, false>(count, nullptr, nullptr);
  }

  // True if nothing was read beyond the current segment.
  bool within_segment() const { return entropy_.position() <= segment_end(); }

 private:
  uint64_t segment_end() const { return uint64_t{stream_.starts[segment_ + 1]} * 8; }

  // Goes to the next segment. libjpeg warns if the old one has a byte or more left, or was too
  // short.
  bool restart() {
    const uint64_t position = entropy_.position(), end = segment_end();
    if (position > end || end - position >= 8 || segment_ + 1 >= stream_.segments) return false;
    segment_++;
    entropy_.seek(end);
    prediction_[0] = prediction_[1] = prediction_[2] = 0;
    left_ = scan_.frame->restart_interval;
    return true;
  }

  template <bool kColor, bool kKeep>
  bool walk(int count, int16_t* blocks, uint8_t* used) {
    const uint64_t stream_bits = uint64_t{stream_.starts[stream_.segments]} * 8;
    const DcTable *dc0 = scan_.dc[0], *dc1 = scan_.dc[1], *dc2 = scan_.dc[2];
    const AcTable *ac0 = scan_.ac[0], *ac1 = scan_.ac[1], *ac2 = scan_.ac[2];
    const int luma = luma_;
    Entropy entropy = entropy_;  // a local copy lives in registers
    while (count > 0) {
      int run = count;
      if (scan_.frame->restart_interval) {
        if (!left_) {
          entropy_ = entropy;
          if (!restart()) return false;
          entropy = entropy_;
        }
        run = smaller(run, left_);
        left_ -= run;
      }
      count -= run;
      for (; run > 0; run--) {
        if constexpr (kKeep) {
          for (int i = 0; i < luma; i++, blocks += 64)
            if (!(*used++ = uint8_t(entropy.decode(*dc0, *ac0, blocks, prediction_[0]))))
              return false;
          if constexpr (kColor) {
            if (!(*used++ = uint8_t(entropy.decode(*dc1, *ac1, blocks, prediction_[1]))))
              return false;
            blocks += 64;
            if (!(*used++ = uint8_t(entropy.decode(*dc2, *ac2, blocks, prediction_[2]))))
              return false;
            blocks += 64;
          }
        } else {
          for (int i = 0; i < luma; i++)
            if (!entropy.skip(*dc0, *ac0, prediction_[0])) return false;
          if constexpr (kColor) {
            if (!entropy.skip(*dc1, *ac1, prediction_[1])) return false;
            if (!entropy.skip(*dc2, *ac2, prediction_[2])) return false;
          }
        }
        if (entropy.position() > stream_bits) return false;
      }
    }
    entropy_ = entropy;
    return true;
  }

  const Scan& scan_;
  const Stream& stream_;
  const int luma_;
  const bool color_;
  int left_;  // MCUs before the next restart marker
  size_t segment_ = 0;
  int prediction_[3] = {0, 0, 0};
  Entropy entropy_;
};

inline uint8_t* line(const Plane& plane, int y) {
  return plane.data + size_t(y & (plane.lines - 1)) * plane.stride;
}

// Transforms a strip of `count` MCUs, the first at column `column` of the window, into the planes.
// False if a coefficient is beyond the product limit.
template <class Kernels>
bool transform_strip(const Scan& scan, int mcu_y, int column, int count, const uint8_t* used) {
  const Frame& frame = *scan.frame;
  const int per_mcu = frame.blocks_per_mcu;
  int offset = 0;  // of the component's first block in an MCU
  for (int c = 0; c < frame.components; c++) {
    const Component& component = frame.component[c];
    const int h = component.h, width = count * h;
    constexpr int kBlocks = Kernels::kBlocks;
    typename Kernels::Excess excess{};
    for (int v = 0; v < component.v; v++) {
      const Plane& plane = scan.plane[c];
      uint8_t* out = line(plane, (mcu_y * component.v + v) * 8) + size_t(column) * size_t(h) * 8;
      for (int x = 0; x < width; x += kBlocks, out += 8 * kBlocks) {
        const int16_t* blocks[kBlocks];
        int most = 0;
        for (int i = 0; i < kBlocks; i++) {
          const int at = smaller(x + i, width - 1);  // the last one again fills up
          const int block = (at >> (h - 1)) * per_mcu + offset + v * h + (at & (h - 1));
          blocks[i] = scan.coefficients + 64 * block;
          most = larger(most, used[block]);
        }
        Kernels::transform(blocks, most, scan.quant[c], out, plane.stride, excess);
      }
    }
    if (Kernels::any(excess)) return false;
    offset += h * component.v;
  }
  return true;
}

// Repeats the first and last chroma sample of the image beside its lines, for horizontal
// upsampling.
inline void extend_chroma(const Scan& scan, int mcu_y) {
  const int samples = (scan.x1 - scan.x0) * 8, left = scan.frame->component[1].width - scan.x0 * 8;
  for (int c = 1; c < 3; c++) {
    for (int i = 0; i < 8; i++) {
      uint8_t* samples_line = line(scan.plane[c], mcu_y * 8 + i);
      if (scan.x0 == 0) samples_line[-1] = samples_line[0];
      const int end = smaller(left, samples);
      samples_line[end] = samples_line[end - 1];
    }
  }
}

// Note [Upsampling]
// libjpeg's triangle filter, with s[-1] = s[0] and s[n] = s[n - 1] at the edges of the image (not
// of the padded blocks):
//   4:2:2  out[2i] = (3 s[i] + s[i-1] + 1) >> 2      out[2i+1] = (3 s[i] + s[i+1] + 2) >> 2
//   4:4:0  out = (3 near + far + (1 for even lines, 2 for odd lines)) >> 2
//   4:2:0  t = 3 near + far; out[2i] = (3 t[i] + t[i-1] + 8) >> 4      out[2i+1] = (3 t[i] + t[i+1]
//   + 7) >> 4
// near is chroma line y / 2; far the one above for even y and the one below for odd y, clamped to
// the image. Chroma of one or two columns that must be widened is replicated, in both directions.
template <class Kernels>
void emit_line(const Scan& scan, int y, uint8_t* out) {
  const Frame& frame = *scan.frame;
  const int h = frame.max_h, v = frame.max_v, width = scan.region.width;
  const int left = scan.region.x - scan.x0 * 8 * h;  // of the region, in samples of the window
  const uint8_t* luma = line(scan.plane[0], y) + left;
  if (frame.components == 1) {
    Kernels::gray(luma, out, width);
    return;
  }
  if (h == 1 && v == 1) {
    Kernels::color(luma, line(scan.plane[1], y) + left, line(scan.plane[2], y) + left, out, width);
    return;
  }
  const int first = left / h & ~15;  // chroma columns that are needed
  const int count = smaller((scan.x1 - scan.x0) * 8, (left + width + h - 1) / h) - first;
  const int near_y = v == 2 ? y >> 1 : y;
  const int far_y = v == 1  ? y
                    : y & 1 ? smaller(near_y + 1, frame.component[1].height - 1)
                            : larger(near_y - 1, 0);
  for (int c = 1; c < 3; c++) {
    const uint8_t* near = line(scan.plane[c], near_y) + first;
    const uint8_t* far = line(scan.plane[c], far_y) + first;
    uint8_t* wide = scan.upsampled[c - 1] + first * h;
    if (h == 1) {
      Kernels::upsample_v(near, far, wide, count, y & 1 ? 2 : 1);
    } else if (frame.component[1].width <= 2) {
      for (int i = 0; i < count; i++) wide[2 * i] = wide[2 * i + 1] = near[i];
    } else if (v == 1) {
      Kernels::upsample_h(near, wide, count);
    } else {
      Kernels::upsample_hv(near, far, wide, count);
    }
  }
  Kernels::color(luma, scan.upsampled[0] + left, scan.upsampled[1] + left, out, width);
}

template <class Kernels>
Status decode_scan(const Scan& scan) {
  const Frame& frame = *scan.frame;
  const Rect& region = scan.region;
  const int bottom = region.y + region.height;
  Stream stream;
  const Status status = unstuff<Kernels>(scan, stream);
  if (status != Status::ok) return status;
  Reader<typename Kernels::Entropy> reader(scan, stream);
  for (int mcu_y = 0; mcu_y < scan.y0; mcu_y++)
    if (!reader.skip(frame.mcus_x)) return Status::corrupt;
  uint8_t used[kStripMcus * 6];
  int y = region.y;
  for (int mcu_y = scan.y0; mcu_y < scan.y1; mcu_y++) {
    if (!reader.skip(scan.x0)) return Status::corrupt;
    for (int x = scan.x0; x < scan.x1; x += kStripMcus) {
      const int count = smaller(kStripMcus, scan.x1 - x);
      if (!reader.decode(count, scan.coefficients, used)) return Status::corrupt;
      if (!transform_strip<Kernels>(scan, mcu_y, x - scan.x0, count, used)) return Status::corrupt;
    }
    if (mcu_y + 1 < scan.y1 && !reader.skip(frame.mcus_x - scan.x1)) return Status::corrupt;
    if (frame.components == 3 && frame.max_h == 2) extend_chroma(scan, mcu_y);
    // With halved chroma lines, the last line of an MCU row waits for the next row.
    int ready = frame.max_v == 2 ? 16 * mcu_y + 15 : 8 * mcu_y + 8;
    if (mcu_y == frame.mcus_y - 1 || ready > bottom) ready = bottom;
    for (; y < ready; y++) emit_line<Kernels>(scan, y, scan.pixels + (y - region.y) * scan.stride);
  }
  return reader.within_segment() ? Status::ok : Status::corrupt;
}

}  // namespace
}  // namespace stoker::jpeg
