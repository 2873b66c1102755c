#include "convert.hpp"

#include <cmath>
#include <cstring>

#include "convert_kernels.hpp"

namespace stoker {
namespace {

template <class T>
void look_up(const T (*table)[256], const uint8_t* row, int width, int channels, T* out,
             size_t plane) {
  for (int c = 0; c < channels; ++c) {
    for (int x = 0; x < width; ++x) out[c * plane + x] = table[c][row[3 * x + c]];
  }
}

void planar(const Conversion& conversion, const uint8_t* row, int width, void* out, size_t plane) {
  const int channels = conversion.channels;
  switch (conversion.format) {
    case PixelFormat::f32_chw:
      look_up(conversion.table_f32, row, width, channels, static_cast<float*>(out), plane);
      break;
    case PixelFormat::u16_chw:
      look_up(conversion.table_u16, row, width, channels, static_cast<uint16_t*>(out), plane);
      break;
    default:
      for (int c = 0; c < channels; ++c) {
        uint8_t* to = static_cast<uint8_t*>(out) + c * plane;
        for (int x = 0; x < width; ++x) to[x] = row[3 * x + c];
      }
  }
}

void gray(const uint8_t* row, int width, uint8_t* out) {
  for (int x = 0; x < width; ++x) {
    const uint32_t sum =
        19595u * row[3 * x] + 38470u * row[3 * x + 1] + 7471u * row[3 * x + 2] + 32768u;
    out[3 * x] = out[3 * x + 1] = out[3 * x + 2] = static_cast<uint8_t>(sum >> 16);
  }
}

void mirror(const uint8_t* row, int width, uint8_t* out) {
  for (int x = 0; x < width; ++x) std::memcpy(out + 3 * (width - 1 - x), row + 3 * x, 3);
}

constexpr ConvertKernels kScalar = {planar, gray, mirror};

const ConvertKernels& kernels(SimdLevel level) {
#if defined(STOKER_X86)
  if (level == SimdLevel::avx512) return kConvertAvx512;
  if (level == SimdLevel::avx2) return kConvertAvx2;
#endif
  static_cast<void>(level);
  return kScalar;
}

void write_row(const ConvertKernels& kernel, const uint8_t* row, int y, const Output& output) {
  const Conversion& conversion = *output.conversion;
  const int width = output.width;
  if (output.flip_y) y = output.height - 1 - y;
  uint8_t* out = static_cast<uint8_t*>(output.data);
  const size_t pixel = static_cast<size_t>(y) * width;
  const size_t plane = static_cast<size_t>(output.height) * width;
  switch (conversion.format) {
    case PixelFormat::u8_hwc:
      out += y * output.stride;
      if (conversion.channels == 3) {
        std::memcpy(out, row, static_cast<size_t>(width) * 3);
      } else {
        for (int x = 0; x < width; ++x) out[x] = row[3 * x];
      }
      break;
    case PixelFormat::u8_chw: kernel.planar(conversion, row, width, out + pixel, plane); break;
    case PixelFormat::f32_chw: kernel.planar(conversion, row, width, out + 4 * pixel, plane); break;
    case PixelFormat::u16_chw: kernel.planar(conversion, row, width, out + 2 * pixel, plane); break;
  }
}

// Splits the table's entries into bytes.
template <class T>
void split_bytes(Conversion& conversion, const T (*table)[256]) {
  std::memset(conversion.table_bytes, 0, sizeof conversion.table_bytes);
  for (int c = 0; c < 3; ++c) {
    for (int x = 0; x < 256; ++x) {
      uint8_t bytes[sizeof(T)];
      std::memcpy(bytes, &table[c][x], sizeof(T));
      for (size_t k = 0; k < sizeof(T); ++k) conversion.table_bytes[c][k][x] = bytes[k];
    }
  }
}

// One value by formula: the operations of the kernels. fma rounds once, in hardware or not.
float evaluate(const Conversion& conversion, Conversion::Formula formula, int channel, int byte) {
  const float x = static_cast<float>(byte);
  float value = formula == Conversion::Formula::multiply
                    ? x * kInverse255
                    : std::fma(x, kInverse255, x * kInverse255Rest);
  value -= conversion.mean[channel];
  return std::fma(value, conversion.reciprocal_high[channel],
                  value * conversion.reciprocal_low[channel]);
}

bool reproduces_table(const Conversion& conversion, Conversion::Formula formula) {
  for (int c = 0; c < 3; ++c) {
    for (int x = 0; x < 256; ++x) {
      const float value = evaluate(conversion, formula, c, x);
      const float wanted = conversion.table_f32[c][x];
      // Subnormals are left to the table: a thread may flush them to zero.
      if (value != 0 && !std::isnormal(value)) return false;
      if (std::memcmp(&value, &wanted, sizeof value) != 0) return false;
    }
  }
  return true;
}

}  // namespace

void set_table(Conversion& conversion, const float* table, const float* mean, const float* std) {
  conversion.format = PixelFormat::f32_chw;
  std::memcpy(conversion.table_f32, table, sizeof conversion.table_f32);
  split_bytes(conversion, conversion.table_f32);
  conversion.formula = Conversion::Formula::table;
  for (int c = 0; c < 3; ++c) {
    const double reciprocal = 1.0 / (std ? static_cast<double>(std[c]) : 1.0);
    if (!(std::fabs(reciprocal) > 1e-30 && std::fabs(reciprocal) < 1e30)) return;
    conversion.mean[c] = mean ? mean[c] : 0.0f;
    conversion.reciprocal_high[c] = static_cast<float>(reciprocal);
    conversion.reciprocal_low[c] =
        static_cast<float>(reciprocal - static_cast<double>(conversion.reciprocal_high[c]));
  }
  if (reproduces_table(conversion, Conversion::Formula::divide)) {
    conversion.formula = Conversion::Formula::divide;
  } else if (reproduces_table(conversion, Conversion::Formula::multiply)) {
    conversion.formula = Conversion::Formula::multiply;
  }
}

void set_table(Conversion& conversion, const uint16_t* table) {
  conversion.format = PixelFormat::u16_chw;
  conversion.formula = Conversion::Formula::table;
  std::memcpy(conversion.table_u16, table, sizeof conversion.table_u16);
  split_bytes(conversion, conversion.table_u16);
}

void convert_unfenced(SimdLevel level, const uint8_t* source, ptrdiff_t stride, int y, int rows,
                      bool flip_x, uint8_t* scratch, const Output& output) {
  const ConvertKernels& kernel = kernels(level);
#if defined(STOKER_X86)
  const ConvertKernels& simple = level == SimdLevel::avx512 ? kConvertAvx2 : kernel;
#else
  const ConvertKernels& simple = kernel;
#endif
  uint8_t* changed = scratch + kRowSlack;
  for (int i = 0; i < rows; ++i) {
    const uint8_t* row = source + i * stride;
    if (flip_x) {
      simple.mirror(row, output.width, changed);
      row = changed;
    }
    if (output.gray) {
      simple.gray(row, output.width, changed);
      row = changed;
    }
    write_row(kernel, row, y + i, output);
  }
}

void fence_rows() {
#if defined(STOKER_X86)
  __builtin_ia32_sfence();
#endif
}

void convert_rows(SimdLevel level, const uint8_t* source, ptrdiff_t stride, int y, int rows,
                  bool flip_x, uint8_t* scratch, const Output& output) {
  convert_unfenced(level, source, stride, y, rows, flip_x, scratch, output);
  fence_rows();
}

}  // namespace stoker
