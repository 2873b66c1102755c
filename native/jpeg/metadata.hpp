// What application segments mean for pixels: colour space, orientation, and the oddities at which
// Pillow's parser raises.
#pragma once

#include <cstddef>
#include <cstdint>

#include "status.hpp"

namespace stoker::jpeg {

struct Bytes {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

struct Metadata {
  bool jfif = false;         // as libjpeg sees it
  int adobe_transform = -1;  // -1: no Adobe segment
  bool density = false;  // JFIF tells dots per inch or centimetre: Pillow then leaves EXIF alone
  bool exif_seen = false;
  Bytes exif;  // the TIFF structure inside the first Exif segment
  Bytes xmp;   // of the last XMP segment; empty: none
  Bytes mpf;   // the TIFF structure inside the last multi-picture segment; empty: none
};

// Takes note of an application segment; marker is 0xE0 to 0xEF and payload what follows the length.
// Status::unsupported where Pillow might raise because of it.
Status note_segment(Metadata& metadata, int marker, Bytes payload);

// To be called after the last segment. Status::oriented if `upright` is asked for and EXIF or XMP
// may turn the image (with the semantics of Pillow's ImageOps.exif_transpose), Status::unsupported
// where Pillow might raise.
Status check_metadata(const Metadata& metadata, bool upright);

}  // namespace stoker::jpeg
