// Row conversion with AVX-512: formulas in 16 lanes, tables of bytes in registers (VBMI).
#include <immintrin.h>

// GCC 12 takes the deliberately undefined registers inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "convert_kernels.hpp"

namespace stoker {
namespace {

#define STOKER_INLINE inline __attribute__((always_inline))

struct alignas(64) Indexes {
  uint8_t channel[3][64];
};

constexpr Indexes first32_indexes() {
  Indexes indexes{};
  for (int c = 0; c < 3; ++c) {
    for (int i = 0; i < 32; ++i) indexes.channel[c][i] = static_cast<uint8_t>(3 * i + c);
  }
  return indexes;
}

// For 64 pixels whose elements are put together from bytes by unpacking: byte `run` * k + j of a
// 128-bit lane belongs to pixel run * (4 k + lane) + j, so that the unpacked vectors hold
// consecutive pixels.
constexpr Indexes unpacked_indexes(int run) {
  Indexes indexes{};
  for (int c = 0; c < 3; ++c) {
    for (int lane = 0; lane < 4; ++lane) {
      for (int i = 0; i < 16; ++i) {
        const int k = i / run, j = i % run;
        indexes.channel[c][16 * lane + i] =
            static_cast<uint8_t>(3 * (run * (4 * k + lane) + j) + c);
      }
    }
  }
  return indexes;
}

constexpr Indexes kFirst32 = first32_indexes();
constexpr Indexes kUnpacked16 = unpacked_indexes(8);
constexpr Indexes kUnpacked32 = unpacked_indexes(4);

// The lowest `count` bits; count may be negative or large.
STOKER_INLINE uint64_t low_bits(int count) {
  return count >= 64 ? ~uint64_t{0} : count <= 0 ? 0 : ~uint64_t{0} >> (64 - count);
}

// The bytes of `left` pixels (32 at most). Reads nothing beyond them.
struct Pixels32 {
  __m512i low, high;
  STOKER_INLINE Pixels32(const uint8_t* from, int left) {
    if (left >= 32) {
      low = _mm512_loadu_si512(from);
      high =
          _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 64)));
    } else {
      low = _mm512_maskz_loadu_epi8(low_bits(3 * left), from);
      high = _mm512_maskz_loadu_epi8(low_bits(3 * left - 64), from + 64);
    }
  }
  STOKER_INLINE __m256i channel(int c) const {
    const __m512i index = _mm512_load_si512(kFirst32.channel[c]);
    return _mm512_castsi512_si256(_mm512_permutex2var_epi8(low, index, high));
  }
};

template <int kChannels>
void write_bytes(const uint8_t* row, int width, uint8_t* out, size_t plane) {
  for (int x = 0; x < width; x += 32) {
    const Pixels32 pixels(row + 3 * x, width - x);
    const __mmask32 wanted = static_cast<__mmask32>(low_bits(width - x));
#pragma GCC unroll 3
    for (int c = 0; c < kChannels; ++c) {
      _mm256_mask_storeu_epi8(out + c * plane + x, wanted, pixels.channel(c));
    }
  }
}

template <bool kMultiply, int kChannels, bool kStream>
void write_formula(const Conversion& conversion, const uint8_t* row, int width, float* out,
                   size_t plane) {
  const __m512 inverse = _mm512_set1_ps(kInverse255), rest = _mm512_set1_ps(kInverse255Rest);
  __m512 mean[3], high[3], low[3];
#pragma GCC unroll 3
  for (int c = 0; c < kChannels; ++c) {
    mean[c] = _mm512_set1_ps(conversion.mean[c]);
    high[c] = _mm512_set1_ps(conversion.reciprocal_high[c]);
    low[c] = _mm512_set1_ps(conversion.reciprocal_low[c]);
  }
  auto value = [&](__m128i bytes, int c) __attribute__((always_inline)) {
    const __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
    __m512 y =
        kMultiply ? _mm512_mul_ps(x, inverse) : _mm512_fmadd_ps(x, inverse, _mm512_mul_ps(x, rest));
    y = _mm512_sub_ps(y, mean[c]);
    return _mm512_fmadd_ps(y, high[c], _mm512_mul_ps(y, low[c]));
  };
  auto store = [](float* to, __m512 values) __attribute__((always_inline)) {
    if (kStream) {
      _mm512_stream_ps(to, values);
    } else {
      _mm512_storeu_ps(to, values);
    }
  };
  int x = 0;
  for (; x + 32 <= width; x += 32) {
    const Pixels32 pixels(row + 3 * x, 32);
#pragma GCC unroll 3
    for (int c = 0; c < kChannels; ++c) {
      const __m256i bytes = pixels.channel(c);
      float* to = out + c * plane + x;
      store(to, value(_mm256_castsi256_si128(bytes), c));
      store(to + 16, value(_mm256_extracti128_si256(bytes, 1), c));
    }
  }
  if (x < width) {
    const Pixels32 pixels(row + 3 * x, width - x);
    const uint64_t wanted = low_bits(width - x);
#pragma GCC unroll 3
    for (int c = 0; c < kChannels; ++c) {
      const __m256i bytes = pixels.channel(c);
      float* to = out + c * plane + x;
      _mm512_mask_storeu_ps(to, static_cast<__mmask16>(wanted),
                            value(_mm256_castsi256_si128(bytes), c));
      _mm512_mask_storeu_ps(to + 16, static_cast<__mmask16>(wanted >> 16),
                            value(_mm256_extracti128_si256(bytes, 1), c));
    }
  }
}

// 256 bytes in four registers.
struct ByteTable {
  __m512i part[4];
  STOKER_INLINE explicit ByteTable(const uint8_t* table) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) part[i] = _mm512_load_si512(table + 64 * i);
  }
  // upper: where the index is 128 or more.
  STOKER_INLINE __m512i operator()(__m512i index, __mmask64 upper) const {
    return _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(part[0], index, part[1]),
                                  _mm512_permutex2var_epi8(part[2], index, part[3]));
  }
};

// One channel of 64 pixels in the order of `index`.
STOKER_INLINE __m512i channel64(const uint8_t* from, int left, __m512i index) {
  const int bytes = 3 * (left < 64 ? left : 64);
  const __m512i a = _mm512_maskz_loadu_epi8(low_bits(bytes), from);
  const __m512i b = _mm512_maskz_loadu_epi8(low_bits(bytes - 64), from + 64);
  const __m512i c = _mm512_maskz_loadu_epi8(low_bits(bytes - 128), from + 128);
  return _mm512_mask_permutexvar_epi8(_mm512_permutex2var_epi8(a, index, b),
                                      _mm512_movepi8_mask(index), index, c);
}

void write_table16(const Conversion& conversion, const uint8_t* row, int width, uint16_t* out,
                   size_t plane) {
  for (int c = 0; c < conversion.channels; ++c, out += plane) {
    const ByteTable low(conversion.table_bytes[c][0]), high(conversion.table_bytes[c][1]);
    const __m512i index = _mm512_load_si512(kUnpacked16.channel[c]);
    for (int x = 0; x < width; x += 64) {
      const __m512i bytes = channel64(row + 3 * x, width - x, index);
      const __mmask64 upper = _mm512_movepi8_mask(bytes);
      const __m512i lows = low(bytes, upper), highs = high(bytes, upper);
      const uint64_t wanted = low_bits(width - x);
      _mm512_mask_storeu_epi16(out + x, static_cast<__mmask32>(wanted),
                               _mm512_unpacklo_epi8(lows, highs));
      _mm512_mask_storeu_epi16(out + x + 32, static_cast<__mmask32>(wanted >> 32),
                               _mm512_unpackhi_epi8(lows, highs));
    }
  }
}

void write_table32(const Conversion& conversion, const uint8_t* row, int width, float* out,
                   size_t plane) {
  for (int c = 0; c < conversion.channels; ++c, out += plane) {
    const ByteTable byte0(conversion.table_bytes[c][0]), byte1(conversion.table_bytes[c][1]),
        byte2(conversion.table_bytes[c][2]), byte3(conversion.table_bytes[c][3]);
    const __m512i index = _mm512_load_si512(kUnpacked32.channel[c]);
    for (int x = 0; x < width; x += 64) {
      const __m512i bytes = channel64(row + 3 * x, width - x, index);
      const __mmask64 upper = _mm512_movepi8_mask(bytes);
      const __m512i b0 = byte0(bytes, upper), b1 = byte1(bytes, upper);
      const __m512i b2 = byte2(bytes, upper), b3 = byte3(bytes, upper);
      const __m512i low01 = _mm512_unpacklo_epi8(b0, b1), high01 = _mm512_unpackhi_epi8(b0, b1);
      const __m512i low23 = _mm512_unpacklo_epi8(b2, b3), high23 = _mm512_unpackhi_epi8(b2, b3);
      const uint64_t wanted = low_bits(width - x);
      auto store = [&](int k, __m512i value) __attribute__((always_inline)) {
        _mm512_mask_storeu_epi32(out + x + 16 * k, static_cast<__mmask16>(wanted >> (16 * k)),
                                 value);
      };
      store(0, _mm512_unpacklo_epi16(low01, low23));
      store(1, _mm512_unpackhi_epi16(low01, low23));
      store(2, _mm512_unpacklo_epi16(high01, high23));
      store(3, _mm512_unpackhi_epi16(high01, high23));
    }
  }
}

template <bool kMultiply>
void write_formula_channels(const Conversion& conversion, const uint8_t* row, int width, float* out,
                            size_t plane) {
  if (conversion.channels == 1) {
    write_formula<kMultiply, 1, false>(conversion, row, width, out, plane);
  } else if (fills_lines(out, plane, width)) {
    write_formula<kMultiply, 3, true>(conversion, row, width, out, plane);
  } else {
    write_formula<kMultiply, 3, false>(conversion, row, width, out, plane);
  }
}

void planar(const Conversion& conversion, const uint8_t* row, int width, void* out, size_t plane) {
  switch (conversion.format) {
    case PixelFormat::f32_chw: {
      float* to = static_cast<float*>(out);
      if (conversion.formula == Conversion::Formula::divide) {
        write_formula_channels<false>(conversion, row, width, to, plane);
      } else if (conversion.formula == Conversion::Formula::multiply) {
        write_formula_channels<true>(conversion, row, width, to, plane);
      } else {
        write_table32(conversion, row, width, to, plane);
      }
      break;
    }
    case PixelFormat::u16_chw:
      write_table16(conversion, row, width, static_cast<uint16_t*>(out), plane);
      break;
    default:
      if (conversion.channels == 3) {
        write_bytes<3>(row, width, static_cast<uint8_t*>(out), plane);
      } else {
        write_bytes<1>(row, width, static_cast<uint8_t*>(out), plane);
      }
  }
}

}  // namespace

extern const ConvertKernels kConvertAvx512;
const ConvertKernels kConvertAvx512 = {planar, nullptr, nullptr};

}  // namespace stoker
