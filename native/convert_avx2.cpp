// Row conversion with AVX2: 16 pixels per step.
#include <immintrin.h>

#include <cstring>

#include "convert_kernels.hpp"

namespace stoker {
namespace {

#define STOKER_INLINE inline __attribute__((always_inline))

struct Planes {
  __m128i red, green, blue;
};

STOKER_INLINE __m128i load16(const uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

STOKER_INLINE void store16(void* to, __m128i value) {
  _mm_storeu_si128(static_cast<__m128i*>(to), value);
}

STOKER_INLINE __m128i either(__m128i a, __m128i b, __m128i c) {
  return _mm_or_si128(_mm_or_si128(a, b), c);
}

// 16 interleaved pixels to three vectors of 16 bytes. Reads 48 bytes.
STOKER_INLINE Planes deinterleave(const uint8_t* from) {
  const __m128i a = load16(from), b = load16(from + 16), c = load16(from + 32);
  constexpr char n = -1;  // pshufb: zero
  Planes planes;
  planes.red =
      either(_mm_shuffle_epi8(a, _mm_setr_epi8(0, 3, 6, 9, 12, 15, n, n, n, n, n, n, n, n, n, n)),
             _mm_shuffle_epi8(b, _mm_setr_epi8(n, n, n, n, n, n, 2, 5, 8, 11, 14, n, n, n, n, n)),
             _mm_shuffle_epi8(c, _mm_setr_epi8(n, n, n, n, n, n, n, n, n, n, n, 1, 4, 7, 10, 13)));
  planes.green =
      either(_mm_shuffle_epi8(a, _mm_setr_epi8(1, 4, 7, 10, 13, n, n, n, n, n, n, n, n, n, n, n)),
             _mm_shuffle_epi8(b, _mm_setr_epi8(n, n, n, n, n, 0, 3, 6, 9, 12, 15, n, n, n, n, n)),
             _mm_shuffle_epi8(c, _mm_setr_epi8(n, n, n, n, n, n, n, n, n, n, n, 2, 5, 8, 11, 14)));
  planes.blue =
      either(_mm_shuffle_epi8(a, _mm_setr_epi8(2, 5, 8, 11, 14, n, n, n, n, n, n, n, n, n, n, n)),
             _mm_shuffle_epi8(b, _mm_setr_epi8(n, n, n, n, n, 1, 4, 7, 10, 13, n, n, n, n, n, n)),
             _mm_shuffle_epi8(c, _mm_setr_epi8(n, n, n, n, n, n, n, n, n, n, 0, 3, 6, 9, 12, 15)));
  return planes;
}

// The element writers turn 16 bytes of one channel into 16 elements.

struct Bytes {
  using Element = uint8_t;
  Bytes(const Conversion&, int) {}
  STOKER_INLINE void operator()(__m128i bytes, uint8_t* out) const { store16(out, bytes); }
};

template <bool kMultiply, bool kStream>
struct Formula {
  using Element = float;
  __m256 mean, reciprocal_high, reciprocal_low;
  Formula(const Conversion& conversion, int c)
      : mean(_mm256_set1_ps(conversion.mean[c])),
        reciprocal_high(_mm256_set1_ps(conversion.reciprocal_high[c])),
        reciprocal_low(_mm256_set1_ps(conversion.reciprocal_low[c])) {}
  STOKER_INLINE __m256 value(__m128i bytes) const {
    const __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
    __m256 y = _mm256_mul_ps(x, _mm256_set1_ps(kMultiply ? kInverse255 : kInverse255Rest));
    if (!kMultiply) y = _mm256_fmadd_ps(x, _mm256_set1_ps(kInverse255), y);
    y = _mm256_sub_ps(y, mean);
    return _mm256_fmadd_ps(y, reciprocal_high, _mm256_mul_ps(y, reciprocal_low));
  }
  STOKER_INLINE void operator()(__m128i bytes, float* out) const {
    const __m256 low = value(bytes), high = value(_mm_srli_si128(bytes, 8));
    if (kStream) {
      _mm256_stream_ps(out, low);
      _mm256_stream_ps(out + 8, high);
    } else {
      _mm256_storeu_ps(out, low);
      _mm256_storeu_ps(out + 8, high);
    }
  }
};

struct Table32 {
  using Element = float;
  const float* table;
  Table32(const Conversion& conversion, int c) : table(conversion.table_f32[c]) {}
  STOKER_INLINE void operator()(__m128i bytes, float* out) const {
    alignas(16) uint8_t index[16];
    store16(index, bytes);
    for (int i = 0; i < 16; ++i) out[i] = table[index[i]];
  }
};

struct Table16 {
  using Element = uint16_t;
  const uint16_t* table;
  Table16(const Conversion& conversion, int c) : table(conversion.table_u16[c]) {}
  STOKER_INLINE void operator()(__m128i bytes, uint16_t* out) const {
    alignas(16) uint8_t index[16];
    store16(index, bytes);
    for (int i = 0; i < 16; ++i) out[i] = table[index[i]];
  }
};

template <class Writer, int kChannels>
void write_planes(const Conversion& conversion, const uint8_t* row, int width, void* data,
                  size_t plane) {
  using Element = typename Writer::Element;
  Element* out = static_cast<Element*>(data);
  const Writer red(conversion, 0), green(conversion, 1), blue(conversion, 2);
  auto step = [&](const uint8_t* from, Element* to, size_t pitch) __attribute__((always_inline)) {
    const Planes planes = deinterleave(from);
    red(planes.red, to);
    if (kChannels == 3) {
      green(planes.green, to + pitch);
      blue(planes.blue, to + 2 * pitch);
    }
  };
  int x = 0;
  for (; x + 16 <= width; x += 16) step(row + 3 * x, out + x, plane);
  if (x == width) return;
  if (width >= 16) {  // the last step overlaps the one before
    step(row + 3 * (width - 16), out + width - 16, plane);
    return;
  }
  Element last[48];
  step(row, last, 16);
  for (int c = 0; c < kChannels; ++c) {
    std::memcpy(out + c * plane, last + 16 * c, sizeof(Element) * static_cast<size_t>(width));
  }
}

template <class Writer>
void write_channels(const Conversion& conversion, const uint8_t* row, int width, void* out,
                    size_t plane) {
  if (conversion.channels == 3) {
    write_planes<Writer, 3>(conversion, row, width, out, plane);
  } else {
    write_planes<Writer, 1>(conversion, row, width, out, plane);
  }
}

template <bool kMultiply>
void write_formula(const Conversion& conversion, const uint8_t* row, int width, float* out,
                   size_t plane) {
  if (fills_lines(out, plane, width)) {
    write_channels<Formula<kMultiply, true>>(conversion, row, width, out, plane);
  } else {
    write_channels<Formula<kMultiply, false>>(conversion, row, width, out, plane);
  }
}

void planar(const Conversion& conversion, const uint8_t* row, int width, void* out, size_t plane) {
  switch (conversion.format) {
    case PixelFormat::f32_chw: {
      float* to = static_cast<float*>(out);
      if (conversion.formula == Conversion::Formula::divide) {
        write_formula<false>(conversion, row, width, to, plane);
      } else if (conversion.formula == Conversion::Formula::multiply) {
        write_formula<true>(conversion, row, width, to, plane);
      } else {
        write_channels<Table32>(conversion, row, width, to, plane);
      }
      break;
    }
    case PixelFormat::u16_chw: write_channels<Table16>(conversion, row, width, out, plane); break;
    default: write_channels<Bytes>(conversion, row, width, out, plane);
  }
}

// Luma of 8 pixels, given their channels as 16-bit numbers. 38470 does not fit a signed 16-bit
// weight, so green is given twice with half of it.
STOKER_INLINE __m128i luma8(__m128i red, __m128i green, __m128i blue) {
  const __m128i weights_rg = _mm_set1_epi32(19235 << 16 | 19595);
  const __m128i weights_gb = _mm_set1_epi32(7471 << 16 | 19235);
  const __m128i half = _mm_set1_epi32(32768);
  auto sum = [&](__m128i rg, __m128i gb) __attribute__((always_inline)) {
    const __m128i total =
        _mm_add_epi32(_mm_madd_epi16(rg, weights_rg), _mm_madd_epi16(gb, weights_gb));
    return _mm_srli_epi32(_mm_add_epi32(total, half), 16);
  };
  return _mm_packs_epi32(sum(_mm_unpacklo_epi16(red, green), _mm_unpacklo_epi16(green, blue)),
                         sum(_mm_unpackhi_epi16(red, green), _mm_unpackhi_epi16(green, blue)));
}

void gray(const uint8_t* row, int width, uint8_t* out) {
  const __m128i zero = _mm_setzero_si128();
  for (int x = 0; x < width; x += 16) {
    const Planes p = deinterleave(row + 3 * x);
    const __m128i luma =
        _mm_packus_epi16(luma8(_mm_unpacklo_epi8(p.red, zero), _mm_unpacklo_epi8(p.green, zero),
                               _mm_unpacklo_epi8(p.blue, zero)),
                         luma8(_mm_unpackhi_epi8(p.red, zero), _mm_unpackhi_epi8(p.green, zero),
                               _mm_unpackhi_epi8(p.blue, zero)));
    uint8_t* to = out + 3 * x;
    store16(to,
            _mm_shuffle_epi8(luma, _mm_setr_epi8(0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5)));
    store16(to + 16, _mm_shuffle_epi8(
                         luma, _mm_setr_epi8(5, 5, 6, 6, 6, 7, 7, 7, 8, 8, 8, 9, 9, 9, 10, 10)));
    store16(to + 32, _mm_shuffle_epi8(luma, _mm_setr_epi8(10, 11, 11, 11, 12, 12, 12, 13, 13, 13,
                                                          14, 14, 14, 15, 15, 15)));
  }
}

// Five pixels per step; the byte beyond them is overwritten by the next step or lies in the slack.
void mirror(const uint8_t* row, int width, uint8_t* out) {
  const __m128i order = _mm_setr_epi8(-1, 12, 13, 14, 9, 10, 11, 6, 7, 8, 3, 4, 5, 0, 1, 2);
  uint8_t* to = out + 3 * static_cast<ptrdiff_t>(width) - 16;
  for (int x = 0; x < width; x += 5, to -= 15)
    store16(to, _mm_shuffle_epi8(load16(row + 3 * x), order));
}

}  // namespace

extern const ConvertKernels kConvertAvx2;
const ConvertKernels kConvertAvx2 = {planar, gray, mirror};

}  // namespace stoker
