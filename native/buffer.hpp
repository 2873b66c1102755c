// Scratch memory of one thread: 64-byte aligned, grows and never shrinks, contents not kept on
// growth.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace stoker {

// How often any Buffer of the process has allocated. In steady state it stands still (tests count
// it).
inline std::atomic<uint64_t> buffer_allocations{0};

template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(); }

  // At least `count` elements, uninitialised. Throws std::bad_alloc; the engine turns it into a
  // status.
  T* need(size_t count) {
    if (count > capacity_) grow(count);
    return data_;
  }
  T* data() { return data_; }
  size_t capacity() const { return capacity_; }
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(capacity_, other.capacity_);
  }
  void release() {
    ::operator delete[](data_, std::align_val_t(64));
    data_ = nullptr;
    capacity_ = 0;
  }

 private:
  void grow(size_t count) {
    release();
    const size_t wanted = count + count / 4 + 64;
    data_ = static_cast<T*>(::operator new[](wanted * sizeof(T), std::align_val_t(64)));
    capacity_ = wanted;
    buffer_allocations.fetch_add(1, std::memory_order_relaxed);
  }

  T* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace stoker
