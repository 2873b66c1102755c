// Files, or parts of them, into a thread's scratch memory, by pread: never mmap, so a file that
// shrinks is an error and not a signal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffer.hpp"
#include "status.hpp"

namespace stoker {

// Where the samples' bytes are: path i = root + names[offsets[i], offsets[i + 1]). Row i is the
// whole of file i or, where there are shards, `lengths[i]` bytes from `begins[i]` of file
// `shards[i]`; or, where contents[content_offsets[i], content_offsets[i + 1]) is not empty, that.
// The arrays belong to Python, which keeps them alive as long as a Files refers to them.
struct Files {
  std::vector<char> root;
  const char* names = nullptr;
  const uint64_t* offsets = nullptr;  // count + 1 of them, ascending; checked by the binding
  int64_t count = 0;                  // of rows
  const uint32_t* shards = nullptr;   // null, or which file; checked by the binding
  const int64_t* begins = nullptr;    // not negative, like the lengths
  const int64_t* lengths = nullptr;
  int64_t max_bytes = int64_t{1} << 62;
  int64_t max_pixels = int64_t{1} << 40;
  bool upright = false;
  // Null, or of each file device, inode, size and time of the last change in ns, as they must be.
  const int64_t* identities = nullptr;
  const uint8_t* contents = nullptr;
  const uint64_t* content_offsets = nullptr;  // null: no file is in memory
};

// Larger samples are left to Pillow, so that no thread keeps a buffer of their size.
constexpr int64_t kMostBytes = int64_t{1} << 28;

struct FileBytes {
  Status status = Status::ok;
  int64_t detail = 0;  // errno, or the sample's size for too_large
  size_t size = 0;
  const uint8_t* data = nullptr;  // in the buffer, or in memory that Files refers to
};

// Reads the bytes of `row` into the buffer, if they are not in memory. One open, one fstat, one
// pread in the usual case.
FileBytes read_file(const Files& files, int64_t row, Buffer<uint8_t>& buffer);

}  // namespace stoker
