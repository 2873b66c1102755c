#include "jpeg/metadata.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace stoker::jpeg {
namespace {

using std::string_view;

constexpr string_view kExif{"Exif\0\0", 6};
constexpr string_view kXmp{"http://ns.adobe.com/xap/1.0/\0", 29};
constexpr string_view kIccProfile{"ICC_PROFILE\0", 12};
constexpr string_view kPhotoshop{"Photoshop 3.0\0", 14};
constexpr string_view kMultiPicture{"MPF\0", 4};

string_view text(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data), bytes.size}; }

Bytes without_prefix(Bytes bytes, size_t count) { return {bytes.data + count, bytes.size - count}; }

uint32_t big_endian(const uint8_t* p, int count) {
  uint32_t value = 0;
  for (int i = 0; i < count; i++) value = value << 8 | p[i];
  return value;
}

// Pillow walks the image resources and survives any end of data but one: right behind a resource's
// code.
bool photoshop_raises(Bytes s) {
  size_t offset = kPhotoshop.size();
  while (offset + 4 <= s.size && !std::memcmp(s.data + offset, "8BIM", 4)) {
    offset += 6;
    if (offset > s.size) return false;
    if (offset == s.size) return true;
    offset += 1 + s.data[offset];
    offset += offset & 1;
    if (offset + 4 > s.size) return false;
    offset += 4 + size_t{big_endian(s.data + offset, 4)};
    offset += offset & 1;
  }
  return false;
}

// One entry of a TIFF directory, its value inside the data.
struct TiffEntry {
  uint32_t tag, type, count;
  const uint8_t* value;
};

// The first directory of a TIFF structure, read strictly: anything out of the ordinary makes it
// unsound.
class TiffDirectory {
 public:
  explicit TiffDirectory(Bytes data) : data_(data) { sound_ = read_header(); }

  bool sound() const { return sound_; }
  uint32_t entries() const { return entries_; }

  // Clears sound() if the entry's value isn't inside the data.
  TiffEntry entry(uint32_t index) {
    const uint8_t* p = data_.data + first_ + size_t{12} * index;
    TiffEntry entry{number(p, 2), number(p + 2, 2), number(p + 4, 4), p + 8};
    const uint64_t size = uint64_t{entry.count} * type_size(entry.type);
    if (size > 4) {
      const uint32_t offset = number(p + 8, 4);
      out_of_line_ += size;
      if (offset + size > data_.size || out_of_line_ > data_.size) {
        sound_ = false;
        entry.count = 0;
      } else {
        entry.value = data_.data + offset;
      }
    }
    return entry;
  }

  uint32_t number(const uint8_t* p, int count) const {
    if (big_) return big_endian(p, count);
    uint32_t value = 0;
    for (int i = count - 1; i >= 0; i--) value = value << 8 | p[i];
    return value;
  }

 private:
  bool read_header() {
    if (data_.size < 8) return false;
    const string_view magic = text(data_).substr(0, 4);
    if (magic == string_view("MM\0*", 4)) {
      big_ = true;
    } else if (magic != string_view("II*\0", 4)) {
      return false;
    }
    first_ = number(data_.data + 4, 4);
    if (first_ < 8 || first_ + 2 > data_.size) return false;
    entries_ = number(data_.data + first_, 2);
    first_ += 2;
    return first_ + size_t{12} * entries_ + 4 <= data_.size;
  }

  static uint32_t type_size(uint32_t type) {
    constexpr uint8_t kSizes[] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8};
    return type < sizeof kSizes ? kSizes[type] : 0;  // 0: Pillow ignores the entry
  }

  Bytes data_;
  bool sound_ = false, big_ = false;
  size_t first_ = 0;
  uint32_t entries_ = 0;
  uint64_t out_of_line_ = 0;
};

enum : uint32_t { kTiffShort = 3, kTiffLong = 4, kTiffRational = 5, kTiffUndefined = 7 };

// True if Pillow surely reads this EXIF without raising or warning. orientation: 0 if there is
// none.
bool read_exif(Bytes data, uint32_t& orientation) {
  orientation = 0;
  TiffDirectory directory(data);
  if (!directory.sound()) return false;
  uint32_t seen = 0;
  const auto unique = [&](const TiffEntry& entry, uint32_t bit, uint32_t type) {
    const bool fine = entry.type == type && entry.count == 1 && !(seen & bit);
    seen |= bit;
    return fine;
  };
  for (uint32_t i = 0; i < directory.entries(); i++) {
    const TiffEntry entry = directory.entry(i);
    if (!directory.sound()) return false;
    switch (entry.tag) {
      case 0x0112:
        if (!unique(entry, 1, kTiffShort)) return false;
        orientation = directory.number(entry.value, 2);
        break;
      case 0x011A:  // horizontal resolution
        if (!unique(entry, 2, kTiffRational)) return false;
        break;
      case 0x0128:  // resolution unit
        if (!unique(entry, 4, kTiffShort)) return false;
        break;
      default: break;
    }
  }
  return true;
}

// True if Pillow surely reads this multi-picture index without raising; the first picture is the
// file's own.
bool read_mpf(Bytes data) {
  TiffDirectory directory(data);
  if (!directory.sound()) return false;
  uint32_t pictures = 0, listed = 0, seen = 0;
  for (uint32_t i = 0; i < directory.entries(); i++) {
    const TiffEntry entry = directory.entry(i);
    if (!directory.sound()) return false;
    if (entry.tag == 0xB001) {
      if (entry.type != kTiffLong || entry.count != 1 || (seen & 1)) return false;
      seen |= 1;
      pictures = directory.number(entry.value, 4);
    } else if (entry.tag == 0xB002) {
      if (entry.type != kTiffUndefined || entry.count % 16 || (seen & 2)) return false;
      seen |= 2;
      listed = entry.count / 16;
      for (uint32_t k = 0; k < listed; k++)
        if (directory.number(entry.value + size_t{16} * k, 4) & (7u << 24))
          return false;  // not JPEG
    }
  }
  return seen == 3 && pictures == listed && pictures > 0;
}

// Orientation that Pillow finds in XMP: the digit behind the first 'tiff:Orientation="' or
// 'tiff:Orientation>'. 0 if none.
uint32_t xmp_orientation(Bytes xmp) {
  constexpr string_view kName = "tiff:Orientation";
  const string_view all = text(xmp);
  for (size_t at = all.find(kName); at != string_view::npos; at = all.find(kName, at + 1)) {
    string_view rest = all.substr(at + kName.size());
    if (rest.starts_with("=\"")) {
      rest.remove_prefix(2);
    } else if (rest.starts_with(">")) {
      rest.remove_prefix(1);
    } else {
      continue;
    }
    if (!rest.empty() && rest[0] >= '0' && rest[0] <= '9') return uint32_t(rest[0] - '0');
  }
  return 0;
}

bool turns(uint32_t orientation) { return orientation >= 2 && orientation <= 8; }

}  // namespace

Status note_segment(Metadata& metadata, int marker, Bytes payload) {
  const string_view s = text(payload);
  switch (marker) {
    case 0xE0:
      if (!s.starts_with("JFIF")) break;
      if (s.size() < 7) return Status::unsupported;
      if (s.size() >= 14 && s[4] == 0) metadata.jfif = true;
      // Pillow keeps the density of an earlier segment; the difference only matters to EXIF checks,
      // so be strict.
      metadata.density = s.size() >= 12 && (s[7] == 1 || s[7] == 2);
      break;
    case 0xE1:
      if (s.starts_with(kExif)) {
        if (metadata.exif_seen) return Status::unsupported;  // Pillow joins them
        metadata.exif_seen = true;
        metadata.exif = without_prefix(payload, kExif.size());
      } else if (s.starts_with(kXmp)) {
        metadata.xmp = without_prefix(payload, kXmp.size());
      }
      break;
    case 0xE2:
      if (s.starts_with(kIccProfile)) {
        if (s.size() < 14) return Status::unsupported;
      } else if (s.starts_with(kMultiPicture)) {
        metadata.mpf = without_prefix(payload, kMultiPicture.size());
        if (metadata.mpf.size == 0) return Status::unsupported;
      }
      break;
    case 0xED:
      if (s.starts_with(kPhotoshop) && photoshop_raises(payload)) return Status::unsupported;
      break;
    case 0xEE:
      if (!s.starts_with("Adobe")) break;
      if (s.size() < 12) return Status::unsupported;
      metadata.adobe_transform = payload.data[11];
      break;
    default: break;
  }
  return Status::ok;
}

Status check_metadata(const Metadata& metadata, bool upright) {
  if (metadata.mpf.size && !read_mpf(metadata.mpf)) return Status::unsupported;
  uint32_t orientation = 0;
  bool sound = true;
  if (metadata.exif_seen && (upright || !metadata.density)) {
    sound = read_exif(metadata.exif, orientation);
    if (!sound && !upright) return Status::unsupported;
  }
  if (!upright) return Status::ok;
  if (!sound || turns(orientation)) return Status::oriented;
  if (orientation == 0 && turns(xmp_orientation(metadata.xmp))) return Status::oriented;
  return Status::ok;
}

}  // namespace stoker::jpeg
