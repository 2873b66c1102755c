#include "jpeg/decoder.hpp"

#include <algorithm>

#include "buffer.hpp"
#include "jpeg/huffman.hpp"
#include "jpeg/markers.hpp"
#include "jpeg/scan.hpp"

namespace stoker::jpeg {
namespace {

// A bigger skip table is worth its building time (about 25 us more) only when this many bytes are
// skipped.
constexpr size_t kManySkippedBytes = 96 * 1024;

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// The MCUs, along one axis, that output positions [start, end) need. `factor` is 2 where chroma is
// halved along the axis: the triangle filter then reaches one sample beyond, within the `samples`
// that there are.
void needed_mcus(int start, int end, int factor, int samples, int& first, int& last) {
  if (factor == 2) {
    first = std::max(start / 2 - 1, 0) / 8;
    last = std::min((end - 1) / 2 + 1, samples - 1) / 8 + 1;
  } else {
    first = start / 8;
    last = (end - 1) / 8 + 1;
  }
}

void fill_quant(Quant& quant, const uint16_t* factors) {
  for (int i = 0; i < 64; i++) {
    quant.factor[i] = int16_t(factors[i]);
    quant.limit[i] = uint16_t(factors[i] ? std::min(kMaxProduct / factors[i], 32767) : 32768);
  }
}

}  // namespace

struct Decoder::State {
  explicit State(SimdLevel simd) : level(simd) {}

  const SimdLevel level;
  const uint8_t* data = nullptr;
  size_t size = 0;
  bool opened = false;
  Header header;
  Frame frame;
  const DcTable* dc[3] = {};
  AcTable* ac[3] = {};
  Quant quant[3];
  TableCache tables;
  Buffer<uint8_t> stream, lines;
  Buffer<uint32_t> segments;
  alignas(64) int16_t coefficients[kStripCoefficients];

  Status take_tables();
  void place_lines(Scan& scan);
};

// Looks up the decoding tables that the components name.
Status Decoder::State::take_tables() {
  for (int i = 0; i < frame.components; i++) {
    const Component& component = frame.component[i];
    dc[i] = tables.dc(frame.dc[component.dc]);
    ac[i] = tables.ac(frame.ac[component.ac]);
    if (!dc[i] || !ac[i]) return Status::corrupt;
    fill_quant(quant[i], frame.quant[component.quant]);
  }
  return Status::ok;
}

// Lays out the sample lines of scan's window.
void Decoder::State::place_lines(Scan& scan) {
  const size_t mcus = size_t(scan.x1 - scan.x0);
  size_t strides[3], total = kLineSlack;
  for (int i = 0; i < frame.components; i++) {
    const Component& component = frame.component[i];
    Plane& plane = scan.plane[i];
    plane.lines = 8 * component.v * (frame.max_v == 2 ? 2 : 1);
    strides[i] = plane.stride = round_up(mcus * 8 * size_t(component.h), 64) + 2 * kLineSlack;
    total += plane.stride * size_t(plane.lines);
  }
  uint8_t* place = lines.need(total + 2 * strides[0]) + kLineSlack;
  for (int i = 0; i < frame.components; i++) {
    scan.plane[i].data = place;
    place += strides[i] * size_t(scan.plane[i].lines);
  }
  scan.upsampled[0] = place;
  scan.upsampled[1] = place + strides[0];
}

Decoder::Decoder(SimdLevel level)
    : state_(std::make_unique<State>(std::min(level, detected_level()))) {}
Decoder::~Decoder() = default;
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;

Status Decoder::open(const uint8_t* data, size_t size, const Limits& limits) {
  State& s = *state_;
  s.opened = false;
  Status status = parse(data, size, limits, s.frame);
  if (status == Status::ok) status = s.take_tables();
  if (status != Status::ok) return status;
  s.data = data;
  s.size = size;
  s.header = {s.frame.width, s.frame.height, s.frame.components == 1};
  s.opened = true;
  return Status::ok;
}

const Header& Decoder::header() const { return state_->header; }

Status Decoder::decode(const Rect& region, uint8_t* pixels, ptrdiff_t stride) {
  State& s = *state_;
  const Frame& frame = s.frame;
  if (!s.opened || region.x < 0 || region.y < 0 || region.width < 1 || region.height < 1 ||
      region.width > frame.width - region.x || region.height > frame.height - region.y)
    return Status::bad_geometry;

  Scan scan;
  scan.frame = &frame;
  scan.bytes = s.data + frame.scan_offset;
  scan.size = s.size - frame.scan_offset;
  scan.quant = s.quant;
  scan.region = region;
  scan.pixels = pixels;
  scan.stride = stride;
  const Component& chroma = frame.component[frame.components == 3 ? 1 : 0];
  needed_mcus(region.x, region.right(), frame.max_h, chroma.width, scan.x0, scan.x1);
  needed_mcus(region.y, region.bottom(), frame.max_v, chroma.height, scan.y0, scan.y1);

  const int64_t mcus = int64_t{frame.mcus_x} * frame.mcus_y;
  const int64_t kept = int64_t{scan.x1 - scan.x0} * (scan.y1 - scan.y0);
  const int64_t walked = int64_t{frame.mcus_x} * scan.y1;
  const double skipped_bytes = double(scan.size) * double(walked - kept) / double(mcus);
  for (int i = 0; i < frame.components; i++) {
    build_lookup(*s.ac[i]);
    if (walked > kept)
      build_skip(*s.ac[i], skipped_bytes > kManySkippedBytes ? kSkipBitsLarge : kSkipBitsSmall);
    scan.dc[i] = s.dc[i];
    scan.ac[i] = s.ac[i];
  }

  scan.max_segments = 1;
  if (frame.restart_interval)
    scan.max_segments = std::min(size_t(mcus / frame.restart_interval) + 1, scan.size / 2 + 1);
  scan.segments = s.segments.need(scan.max_segments + 1);
  scan.stream = s.stream.need(scan.size + kScanPadding + kLineSlack);
  scan.coefficients = s.coefficients;
  s.place_lines(scan);
  switch (s.level) {
#if defined(STOKER_X86)
    case SimdLevel::avx512: return decode_scan_avx512(scan);
    case SimdLevel::avx2: return decode_scan_avx2(scan);
#endif
    default: return decode_scan_scalar(scan);
  }
}

}  // namespace stoker::jpeg
