// What became of one sample. Python turns these into errors or hands the sample to Pillow
// (src/stoker/engine.py).
#pragma once

#include <cstdint>

namespace stoker {

enum class Status : uint8_t {
  ok = 0,
  // The native decoder declines: the file may be fine, Pillow decides.
  not_jpeg,     // does not start with FF D8
  unsupported,  // progressive, arithmetic, 12-bit, CMYK, unusual sampling, several scans, too many
                // pixels ...
  truncated,    // the data ends before the end-of-image marker
  corrupt,      // anything where libjpeg would warn or fail
  oriented,     // EXIF may rotate the image and the plan asks for upright pixels
  // The sample failed.
  open_failed,  // errno in the sample's detail
  read_failed,  // errno in the sample's detail
  changed,      // the file is not the one that was recorded
  too_large,    // above the byte limit; size in the sample's detail
  out_of_memory,
  bad_geometry,  // the plan cannot be applied to an image of this size (e.g. RandomCrop larger than
                 // the image)
  fallback_failed,  // Pillow failed; Python keeps the exception
  cancelled,
};

// True where Pillow must decide.
inline bool declined(Status status) {
  return status >= Status::not_jpeg && status <= Status::oriented;
}

}  // namespace stoker
