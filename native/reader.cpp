#include "reader.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace stoker {
namespace {

class Descriptor {
 public:
  explicit Descriptor(const char* path) {
    // O_NONBLOCK: a named pipe in a data set must not stop the thread.
    do fd_ = ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    while (fd_ < 0 && errno == EINTR);
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

}  // namespace

FileBytes read_file(const Files& files, int64_t row, Buffer<uint8_t>& buffer) {
  if (files.content_offsets) {
    const uint64_t begin = files.content_offsets[row], end = files.content_offsets[row + 1];
    if (end > begin) return {Status::ok, 0, end - begin, files.contents + begin};
  }
  const int64_t place = files.shards ? files.shards[row] : row;
  const size_t from = files.offsets[place], length = files.offsets[place + 1] - from;
  const size_t root = files.root.size();
  // The path is put together where the file's bytes will be: the name is no longer needed when they
  // arrive.
  char* path = reinterpret_cast<char*>(buffer.need(root + length + 1));
  std::memcpy(path, files.root.data(), root);
  std::memcpy(path + root, files.names + from, length);
  path[root + length] = 0;
  const Descriptor file(path);
  if (file.get() < 0) return {Status::open_failed, errno};
  struct stat info;
  if (::fstat(file.get(), &info) != 0) return {Status::read_failed, errno};
  if (!S_ISREG(info.st_mode)) return {Status::open_failed, S_ISDIR(info.st_mode) ? EISDIR : EINVAL};
  if (files.identities) {
    const int64_t* expected = files.identities + 4 * place;
    const int64_t changed = info.st_mtim.tv_sec * int64_t{1000000000} + info.st_mtim.tv_nsec;
    if (expected[0] != static_cast<int64_t>(info.st_dev) ||
        expected[1] != static_cast<int64_t>(info.st_ino) || expected[2] != info.st_size ||
        expected[3] != changed)
      return {Status::changed};
  }
  const int64_t begin = files.shards ? files.begins[row] : 0;
  const int64_t size = files.shards ? files.lengths[row] : info.st_size;
  if (size > files.max_bytes) return {Status::too_large, size};
  if (size > kMostBytes) return {Status::unsupported, size};
  uint8_t* data = buffer.need(static_cast<size_t>(size) + 1);
  size_t have = 0;
  while (have < static_cast<size_t>(size)) {
    const ssize_t got = ::pread(file.get(), data + have, static_cast<size_t>(size) - have,
                                static_cast<off_t>(begin) + static_cast<off_t>(have));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return {Status::read_failed, errno};
    if (got == 0) break;  // the file has shrunk: the decoder finds it truncated
    have += static_cast<size_t>(got);
  }
  return {Status::ok, 0, have, data};
}

}  // namespace stoker
