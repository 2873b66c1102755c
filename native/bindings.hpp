// What both files of bindings share: types of arrays, names of enums, tensors to fill.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <variant>

#include "engine.hpp"

namespace stoker {

namespace nb = nanobind;
using namespace nb::literals;

using Bytes1d = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Memory = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Image = nb::ndarray<const uint8_t, nb::shape<-1, -1, 3>, nb::device::cpu>;
// Bytes, and where each part of them begins and the last ends.
using Contents = std::tuple<Bytes1d, Offsets>;
using Extents = std::tuple<nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>,
                           nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>,
                           nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>;
using Identities = nb::ndarray<const int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using Code = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pixels = nb::ndarray<const uint8_t, nb::shape<-1, -1, 3>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<nb::ro, nb::shape<3, 256>, nb::c_contig, nb::device::cpu>;
using Triple = std::tuple<float, float, float>;

inline const char* name(Status status) {
  switch (status) {
    case Status::ok: return "ok";
    case Status::not_jpeg: return "not_jpeg";
    case Status::unsupported: return "unsupported";
    case Status::truncated: return "truncated";
    case Status::corrupt: return "corrupt";
    case Status::oriented: return "oriented";
    case Status::open_failed: return "open_failed";
    case Status::read_failed: return "read_failed";
    case Status::changed: return "changed";
    case Status::too_large: return "too_large";
    case Status::out_of_memory: return "out_of_memory";
    case Status::bad_geometry: return "bad_geometry";
    case Status::fallback_failed: return "fallback_failed";
    case Status::cancelled: return "cancelled";
  }
  return "?";
}

template <class T>
T lookup(const std::map<std::string, T>& table, const std::string& key, const char* what) {
  const auto found = table.find(key);
  if (found == table.end()) throw nb::value_error((std::string(what) + ": " + key).c_str());
  return found->second;
}

inline SimdLevel level_of(const std::string& text) {
  const SimdLevel level = lookup<SimdLevel>(
      {{"scalar", SimdLevel::scalar}, {"avx2", SimdLevel::avx2}, {"avx512", SimdLevel::avx512}},
      text, "unknown SIMD level");
  if (level > detected_level()) throw nb::value_error(("not available here: " + text).c_str());
  return level;
}

inline Filter filter_of(const std::string& text) {
  return lookup<Filter>({{"nearest", Filter::nearest},
                         {"box", Filter::box},
                         {"bilinear", Filter::bilinear},
                         {"hamming", Filter::hamming},
                         {"bicubic", Filter::bicubic},
                         {"lanczos", Filter::lanczos}},
                        text, "unknown filter");
}

inline PassOrder order_of(const std::string& text) {
  return lookup<PassOrder>({{"horizontal_first", PassOrder::horizontal_first},
                            {"tall_vertical", PassOrder::tall_vertical},
                            {"cheaper_first", PassOrder::cheaper_first}},
                           text, "unknown pass order");
}

template <class T>
nb::ndarray<nb::numpy, T> new_array(std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (const size_t n : shape) count *= n;
  T* data = new T[count + kRowSlack];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

// Copies an image into dense rows with slack: kernels read up to kRowSlack bytes past the last row.
inline std::vector<uint8_t> dense(const Image& image) {
  const size_t height = image.shape(0), width = image.shape(1);
  std::vector<uint8_t> pixels(height * width * 3 + kRowSlack);
  for (size_t y = 0; y < height; y++)
    for (size_t x = 0; x < width; x++)
      for (size_t c = 0; c < 3; c++) pixels[(y * width + x) * 3 + c] = image(y, x, c);
  return pixels;
}

inline void set_tail(Conversion& conversion, const Table& table, const Triple& mean,
                     const Triple& std) {
  if (table.dtype() == nb::dtype<float>()) {
    const float means[3] = {std::get<0>(mean), std::get<1>(mean), std::get<2>(mean)};
    const float stds[3] = {std::get<0>(std), std::get<1>(std), std::get<2>(std)};
    conversion.format = PixelFormat::f32_chw;
    set_table(conversion, static_cast<const float*>(table.data()), means, stds);
  } else if (table.dtype() == nb::dtype<uint16_t>()) {
    conversion.format = PixelFormat::u16_chw;
    set_table(conversion, static_cast<const uint16_t*>(table.data()));
  } else {
    throw nb::type_error("the table must be float32 or uint16");
  }
}

inline size_t element_bytes(PixelFormat format) {
  return format == PixelFormat::f32_chw ? 4 : format == PixelFormat::u16_chw ? 2 : 1;
}

inline nb::object new_tensor(PixelFormat format, size_t channels, size_t height, size_t width,
                             void** data) {
  const auto make = [&]<class T>(T) {
    auto array = new_array<T>({channels, height, width});
    *data = array.data();
    return nb::cast(array);
  };
  if (format == PixelFormat::f32_chw) return make(float{});
  if (format == PixelFormat::u16_chw) return make(uint16_t{});
  return make(uint8_t{});
}

// Gives the GIL up for as long as it lives. Once the interpreter is exiting, Python up to 3.13 ends
// a (daemon) thread that wants the GIL back by unwinding its stack, and would have C++ abort the
// process: such a thread stays here until the process ends, as later versions have it.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }

 private:
  PyThreadState* state_;
};

// Waits, or works, in slices, so that Ctrl-C is seen. done() runs without the GIL and returns true
// when there is nothing to wait for.
template <class Wait>
bool wait_interruptibly(double seconds, Wait done) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    const auto slice =
        std::clamp(left, std::chrono::milliseconds(0), std::chrono::milliseconds(50));
    bool finished;
    {
      const WithoutGil release;
      finished = done(slice);
    }
    if (finished) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (left <= slice) return false;
  }
}

// bindings_kernels.cpp
void bind_kernels(nb::module_& module);

}  // namespace stoker
