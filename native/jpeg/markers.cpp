#include "jpeg/markers.hpp"

#include <algorithm>
#include <cstring>

#include "jpeg/metadata.hpp"

namespace stoker::jpeg {
namespace {

constexpr int kMaxSide = 65500;  // libjpeg's limit

int number16(const uint8_t* p) { return p[0] << 8 | p[1]; }

// The state of one walk over the segments.
struct Parser {
  Frame& frame;
  const Limits& limits;
  Metadata metadata;
  unsigned quant_seen = 0, dc_seen = 0, ac_seen = 0;  // bit per table

  Status quant_tables(Bytes s) {
    while (s.size) {
      const int wide = s.data[0] >> 4, index = s.data[0] & 15;
      const size_t bytes = wide ? 129 : 65;
      if (index > 3 || wide > 1 || s.size < bytes) return Status::corrupt;
      for (int k = 0; k < 64; k++)
        frame.quant[index][kZigzag.natural[k]] =
            uint16_t(wide ? number16(s.data + 1 + 2 * k) : s.data[1 + k]);
      quant_seen |= 1u << index;
      s = {s.data + bytes, s.size - bytes};
    }
    return Status::ok;
  }

  Status huffman_tables(Bytes s) {
    while (s.size) {
      const int kind = s.data[0] >> 4, index = s.data[0] & 15;
      if (s.size < 17 || kind > 1 || index > 3) return Status::corrupt;
      HuffmanSpec& spec = kind ? frame.ac[index] : frame.dc[index];
      int count = 0;
      for (int i = 0; i < 16; i++) count += s.data[1 + i];
      const size_t bytes = 17 + size_t(count);
      if (count > 256 || s.size < bytes) return Status::corrupt;
      std::memcpy(spec.counts, s.data + 1, 16);
      std::memcpy(spec.symbols, s.data + 17, size_t(count));
      std::memset(spec.symbols + count, 0, 256 - size_t(count));
      spec.size = count;
      (kind ? ac_seen : dc_seen) |= 1u << index;
      s = {s.data + bytes, s.size - bytes};
    }
    return Status::ok;
  }

  Status start_of_frame(Bytes s) {
    if (frame.components) return Status::corrupt;  // a second frame
    if (s.size < 6) return Status::corrupt;
    const int components = s.data[5];
    frame.height = number16(s.data + 1);
    frame.width = number16(s.data + 3);
    if (s.data[0] != 8 || (components != 1 && components != 3)) return Status::unsupported;
    if (frame.height == 0 || frame.width == 0) return Status::corrupt;
    if (frame.height > kMaxSide || frame.width > kMaxSide) return Status::unsupported;
    if (s.size != 6 + 3 * size_t(components)) return Status::corrupt;
    for (int i = 0; i < components; i++) {
      const uint8_t* p = s.data + 6 + 3 * i;
      Component& component = frame.component[i];
      component.id = p[0];
      component.h = p[1] >> 4;
      component.v = p[1] & 15;
      component.quant = p[2];
      if (component.quant > 3 || component.h < 1 || component.h > 4 || component.v < 1 ||
          component.v > 4)
        return Status::corrupt;
      for (int j = 0; j < i; j++)
        if (frame.component[j].id == component.id) return Status::corrupt;
    }
    frame.components = components;
    return Status::ok;
  }

  Status start_of_scan(Bytes s) {
    if (!frame.components || s.size < 1) return Status::corrupt;
    const int components = s.data[0];
    if (s.size != 4 + 2 * size_t(components)) return Status::corrupt;
    if (components != frame.components) return Status::unsupported;  // several scans
    for (int i = 0; i < components; i++) {
      const uint8_t* p = s.data + 1 + 2 * i;
      Component& component = frame.component[i];
      if (p[0] != component.id) return Status::unsupported;
      component.dc = p[1] >> 4;
      component.ac = p[1] & 15;
      // libjpeg would supply standard Huffman tables for missing ones.
      if (component.dc > 3 || component.ac > 3 || !(dc_seen >> component.dc & 1) ||
          !(ac_seen >> component.ac & 1) || !(quant_seen >> component.quant & 1))
        return Status::corrupt;
    }
    const uint8_t* p = s.data + 1 + 2 * components;
    if (p[0] != 0 || p[1] != 63 || p[2] != 0) return Status::unsupported;
    return Status::ok;
  }

  // Sizes that follow from the sampling factors, once the colour space is known to be gray or
  // YCbCr.
  Status finish() {
    if (int64_t{frame.width} * frame.height > limits.max_pixels) return Status::unsupported;
    Component* c = frame.component;
    if (frame.components == 1) {
      c[0].h = c[0].v = 1;  // a scan of one component ignores them
    } else {
      if (!metadata.jfif) {
        const bool rgb =
            metadata.adobe_transform < 0 && c[0].id == 'R' && c[1].id == 'G' && c[2].id == 'B';
        if (rgb || (metadata.adobe_transform >= 0 && metadata.adobe_transform != 1))
          return Status::unsupported;
      }
      if (c[0].h > 2 || c[0].v > 2 || c[1].h != 1 || c[1].v != 1 || c[2].h != 1 || c[2].v != 1)
        return Status::unsupported;
    }
    const int h = frame.max_h = c[0].h, v = frame.max_v = c[0].v;
    frame.mcus_x = (frame.width + 8 * h - 1) / (8 * h);
    frame.mcus_y = (frame.height + 8 * v - 1) / (8 * v);
    frame.blocks_per_mcu = h * v + frame.components - 1;
    for (int i = 0; i < frame.components; i++) {
      c[i].width = (frame.width * c[i].h + h - 1) / h;
      c[i].height = (frame.height * c[i].v + v - 1) / v;
    }
    return check_metadata(metadata, limits.upright);
  }

  Status segment(int marker, Bytes s) {
    if (marker >= 0xE0 && marker <= 0xEF) return note_segment(metadata, marker, s);
    switch (marker) {
      case 0xFE: return Status::ok;  // comment
      case 0xDB: return quant_tables(s);
      case 0xC4: return huffman_tables(s);
      case 0xC0:
      case 0xC1: return start_of_frame(s);
      case 0xDA: return start_of_scan(s);
      case 0xDD:
        if (s.size != 2) return Status::corrupt;
        frame.restart_interval = number16(s.data);
        return Status::ok;
      default:
        // Other frame types, arithmetic coding, DNL, hierarchical frames; the rest makes libjpeg
        // fail.
        return (marker >= 0xC2 && marker <= 0xCF) || (marker >= 0xDC && marker <= 0xDF)
                   ? Status::unsupported
                   : Status::corrupt;
    }
  }
};

}  // namespace

Status parse(const uint8_t* data, size_t size, const Limits& limits, Frame& frame) {
  if (size < 2 || data[0] != 0xFF || data[1] != 0xD8) return Status::not_jpeg;
  if (size > size_t{1} << 31) return Status::unsupported;
  frame.components = 0;
  frame.restart_interval = 0;
  Parser parser{frame, limits, {}};
  size_t at = 2;
  for (;;) {
    if (at >= size) return Status::truncated;
    if (data[at] != 0xFF) return Status::corrupt;
    while (at < size && data[at] == 0xFF) at++;  // fill bytes are allowed
    if (at + 3 > size) return Status::truncated;
    const int marker = data[at];
    // Markers without a segment have no place here: TEM, RSTn, SOI, EOI, and stuffed zeros.
    if (marker <= 0x01 || (marker >= 0xD0 && marker <= 0xD9)) return Status::corrupt;
    const size_t length = size_t(number16(data + at + 1));
    if (length < 2) return Status::corrupt;
    if (at + 1 + length > size) return Status::truncated;
    const Status status = parser.segment(marker, {data + at + 3, length - 2});
    if (status != Status::ok) return status;
    at += 1 + length;
    if (marker == 0xDA) break;
  }
  frame.scan_offset = at;
  return parser.finish();
}

}  // namespace stoker::jpeg
