// The pixel kernels on 256-bit registers: two blocks, 16 chroma samples or 32 pixels at a time.
#pragma once

#include <immintrin.h>

#include "jpeg/scan.hpp"

namespace stoker::jpeg {
namespace {

// Note [Transform]
// libjpeg's accurate integer transform ("islow", after Loeffler, Ligtenberg and Moschytz, 13-bit
// constants): columns first, rounded to 2 extra bits, then rows, rounded to samples. Each product
// pair is one multiply-add in 32 bits; sums of two inputs wrap in 16 bits and results of a pass
// saturate to 16 bits, as in libjpeg-turbo's SIMD code.
namespace avx2 {

__attribute__((always_inline)) inline __m256i factors(int even, int odd) {
  return _mm256_set1_epi32(int(uint32_t(uint16_t(even)) | uint32_t(uint16_t(odd)) << 16));
}

template <int kHigh>
__attribute__((always_inline)) inline __m256i interleave(__m256i a, __m256i b) {
  return kHigh ? _mm256_unpackhi_epi16(a, b) : _mm256_unpacklo_epi16(a, b);
}

__attribute__((always_inline)) inline __m256i multiply(__m256i pairs, int even, int odd) {
  return _mm256_madd_epi16(pairs, factors(even, odd));
}

struct Halves {
  __m256i even[4], odd[4];
};

// 8 of 16 columns of one pass, in 32 bits. kSparse: rows 4 to 7 are zero.
template <int kShift, bool kSparse, int kHigh>
__attribute__((always_inline)) inline Halves butterfly(const __m256i* v) {
  const __m256i zero = _mm256_setzero_si256(), round = _mm256_set1_epi32(1 << (kShift - 1));
  __m256i t0, t1, t2, t3;
  if constexpr (kSparse) {
    t0 = t1 = _mm256_add_epi32(multiply(interleave<kHigh>(v[0], zero), 8192, 0), round);
    const __m256i b = interleave<kHigh>(v[2], zero);
    t3 = multiply(b, 10703, 0);
    t2 = multiply(b, 4433, 0);
  } else {
    const __m256i sum = _mm256_add_epi16(v[0], v[4]), difference = _mm256_sub_epi16(v[0], v[4]);
    t0 = _mm256_add_epi32(multiply(interleave<kHigh>(sum, zero), 8192, 0), round);
    t1 = _mm256_add_epi32(multiply(interleave<kHigh>(difference, zero), 8192, 0), round);
    const __m256i b = interleave<kHigh>(v[2], v[6]);
    t3 = multiply(b, 10703, 4433);
    t2 = multiply(b, 4433, -10704);
  }
  Halves out;
  out.even[0] = _mm256_add_epi32(t0, t3);
  out.even[3] = _mm256_sub_epi32(t0, t3);
  out.even[1] = _mm256_add_epi32(t1, t2);
  out.even[2] = _mm256_sub_epi32(t1, t2);
  const __m256i z =
      kSparse ? interleave<kHigh>(v[3], v[1])
              : interleave<kHigh>(_mm256_add_epi16(v[7], v[3]), _mm256_add_epi16(v[5], v[1]));
  const __m256i z3 = multiply(z, -6436, 9633), z4 = multiply(z, 9633, 6437);
  const __m256i a = interleave<kHigh>(kSparse ? zero : v[7], v[1]);
  const __m256i b = interleave<kHigh>(kSparse ? zero : v[5], v[3]);
  out.odd[0] = _mm256_add_epi32(multiply(a, -7373, 4926), z4);
  out.odd[1] = _mm256_add_epi32(multiply(b, -20995, 4177), z3);
  out.odd[2] = _mm256_add_epi32(multiply(b, -4176, -20995), z4);
  out.odd[3] = _mm256_add_epi32(multiply(a, -4927, -7373), z3);
  return out;
}

template <int kShift, bool kSparse>
__attribute__((always_inline)) inline void pass(__m256i* v) {
  const Halves low = butterfly<kShift, kSparse, 0>(v), high = butterfly<kShift, kSparse, 1>(v);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    v[i] =
        _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(low.even[i], low.odd[i]), kShift),
                           _mm256_srai_epi32(_mm256_add_epi32(high.even[i], high.odd[i]), kShift));
    v[7 - i] =
        _mm256_packs_epi32(_mm256_srai_epi32(_mm256_sub_epi32(low.even[i], low.odd[i]), kShift),
                           _mm256_srai_epi32(_mm256_sub_epi32(high.even[i], high.odd[i]), kShift));
  }
}

// Transposes both blocks; kSparse: only columns 0 to 3 are wanted, as the others are zero.
template <bool kSparse>
__attribute__((always_inline)) inline void transpose(__m256i* v) {
  const __m256i a0 = _mm256_unpacklo_epi16(v[0], v[1]), a1 = _mm256_unpackhi_epi16(v[0], v[1]);
  const __m256i a2 = _mm256_unpacklo_epi16(v[2], v[3]), a3 = _mm256_unpackhi_epi16(v[2], v[3]);
  const __m256i a4 = _mm256_unpacklo_epi16(v[4], v[5]), a5 = _mm256_unpackhi_epi16(v[4], v[5]);
  const __m256i a6 = _mm256_unpacklo_epi16(v[6], v[7]), a7 = _mm256_unpackhi_epi16(v[6], v[7]);
  const __m256i b0 = _mm256_unpacklo_epi32(a0, a2), b1 = _mm256_unpackhi_epi32(a0, a2);
  const __m256i b4 = _mm256_unpacklo_epi32(a4, a6), b5 = _mm256_unpackhi_epi32(a4, a6);
  v[0] = _mm256_unpacklo_epi64(b0, b4);
  v[1] = _mm256_unpackhi_epi64(b0, b4);
  v[2] = _mm256_unpacklo_epi64(b1, b5);
  v[3] = _mm256_unpackhi_epi64(b1, b5);
  if constexpr (!kSparse) {
    const __m256i b2 = _mm256_unpacklo_epi32(a1, a3), b3 = _mm256_unpackhi_epi32(a1, a3);
    const __m256i b6 = _mm256_unpacklo_epi32(a5, a7), b7 = _mm256_unpackhi_epi32(a5, a7);
    v[4] = _mm256_unpacklo_epi64(b2, b6);
    v[5] = _mm256_unpackhi_epi64(b2, b6);
    v[6] = _mm256_unpacklo_epi64(b3, b7);
    v[7] = _mm256_unpackhi_epi64(b3, b7);
  }
}

template <bool kSparse>
__attribute__((always_inline)) inline void transform_pair(const int16_t* a, const int16_t* b,
                                                          const Quant& quant, uint8_t* out,
                                                          size_t stride, __m256i& excess) {
  __m256i v[8];
#pragma GCC unroll 8
  for (int i = 0; i < (kSparse ? 4 : 8); i++) {
    const __m256i coefficients = _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(a + 8 * i))),
        _mm_load_si128(reinterpret_cast<const __m128i*>(b + 8 * i)), 1);
    const __m256i factor = _mm256_broadcastsi128_si256(
        _mm_load_si128(reinterpret_cast<const __m128i*>(quant.factor + 8 * i)));
    const __m256i limit = _mm256_broadcastsi128_si256(
        _mm_load_si128(reinterpret_cast<const __m128i*>(quant.limit + 8 * i)));
    excess = _mm256_or_si256(excess, _mm256_subs_epu16(_mm256_abs_epi16(coefficients), limit));
    v[i] = _mm256_mullo_epi16(coefficients, factor);
  }
  pass<11, kSparse>(v);
  transpose<kSparse>(v);
  pass<18, kSparse>(v);
  // Bytes, transposed back into rows of both blocks side by side.
  const __m256i p = _mm256_packs_epi16(v[0], v[4]), q = _mm256_packs_epi16(v[1], v[5]);
  const __m256i r = _mm256_packs_epi16(v[2], v[6]), s = _mm256_packs_epi16(v[3], v[7]);
  const __m256i pr0 = _mm256_unpacklo_epi8(p, r), pr1 = _mm256_unpackhi_epi8(p, r);
  const __m256i qs0 = _mm256_unpacklo_epi8(q, s), qs1 = _mm256_unpackhi_epi8(q, s);
  const __m256i e0 = _mm256_unpacklo_epi8(pr0, qs0), e1 = _mm256_unpackhi_epi8(pr0, qs0);
  const __m256i f0 = _mm256_unpacklo_epi8(pr1, qs1), f1 = _mm256_unpackhi_epi8(pr1, qs1);
  const __m256i rows[4] = {_mm256_unpacklo_epi32(e0, f0), _mm256_unpackhi_epi32(e0, f0),
                           _mm256_unpacklo_epi32(e1, f1), _mm256_unpackhi_epi32(e1, f1)};
  const __m256i center = _mm256_set1_epi8(char(0x80));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m256i x = _mm256_permute4x64_epi64(_mm256_xor_si256(rows[i], center), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + size_t(2 * i) * stride),
                     _mm256_castsi256_si128(x));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + size_t(2 * i + 1) * stride),
                     _mm256_extracti128_si256(x, 1));
  }
}

// 16 samples as 16-bit numbers.
__attribute__((always_inline)) inline __m256i load16(const uint8_t* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

__attribute__((always_inline)) inline __m256i triple(__m256i x) {
  return _mm256_add_epi16(x, _mm256_add_epi16(x, x));
}

// Even and odd outputs, each in the low byte of 16 bits, side by side.
__attribute__((always_inline)) inline void store_pairs(uint8_t* out, __m256i even, __m256i odd) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_or_si256(even, _mm256_slli_epi16(odd, 8)));
}

// Interleaves 32 pixels into 96 bytes of which `bytes` (rounded up to 32) are stored.
__attribute__((always_inline)) inline void store_rgb(__m256i r, __m256i g, __m256i b, uint8_t* out,
                                                     int bytes) {
  // Spread each channel over its three residues, then pick per byte: position i holds channel i
  // % 3.
  const __m256i spread_r = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10, 5));
  const __m256i spread_g = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10));
  const __m256i spread_b = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(10, 5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15));
  const __m256i second = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0));
  const __m256i third = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0));
  r = _mm256_shuffle_epi8(r, spread_r);
  g = _mm256_shuffle_epi8(g, spread_g);
  b = _mm256_shuffle_epi8(b, spread_b);
  const __m256i v0 = _mm256_blendv_epi8(_mm256_blendv_epi8(r, g, second), b, third);
  const __m256i v1 = _mm256_blendv_epi8(_mm256_blendv_epi8(g, b, second), r, third);
  const __m256i v2 = _mm256_blendv_epi8(_mm256_blendv_epi8(b, r, second), g, third);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute2x128_si256(v0, v1, 0x20));
  if (bytes > 32)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32),
                        _mm256_permute2x128_si256(v2, v0, 0x30));
  if (bytes > 64)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 64),
                        _mm256_permute2x128_si256(v1, v2, 0x31));
}

// Note [Colour]
// With Cb and Cr taken minus 128, libjpeg's 16-bit fixed-point constants give
//   R = Y + ((91881 Cr + 32768) >> 16)        B = Y + ((116130 Cb + 32768) >> 16)
//   G = Y + ((-22554 Cb - 46802 Cr + 32768) >> 16)
// clamped. The multiples of 65536 are split off, which leaves products of 16-bit numbers; equal for
// all inputs.
template <int kHigh>
__attribute__((always_inline)) inline void color16(__m256i y8, __m256i cb8, __m256i cr8, __m256i& r,
                                                   __m256i& g, __m256i& b) {
  const __m256i zero = _mm256_setzero_si256(), center = _mm256_set1_epi16(128);
  const auto widen = [&](__m256i x) __attribute__((always_inline)) {
    return kHigh ? _mm256_unpackhi_epi8(x, zero) : _mm256_unpacklo_epi8(x, zero);
  };
  const __m256i y = widen(y8);
  const __m256i cb = _mm256_sub_epi16(widen(cb8), center),
                cr = _mm256_sub_epi16(widen(cr8), center);
  const __m256i t = _mm256_mulhi_epi16(_mm256_add_epi16(cr, cr), _mm256_set1_epi16(26345));
  r = _mm256_add_epi16(
      y, _mm256_add_epi16(cr, _mm256_srai_epi16(_mm256_add_epi16(t, _mm256_set1_epi16(1)), 1)));
  b = _mm256_add_epi16(y, _mm256_add_epi16(_mm256_add_epi16(cb, cb),
                                           _mm256_mulhrs_epi16(cb, _mm256_set1_epi16(-7471))));
  const __m256i round = _mm256_set1_epi32(32768);
  const __m256i g0 = _mm256_srai_epi32(
      _mm256_add_epi32(multiply(_mm256_unpacklo_epi16(cb, cr), -22554, 18734), round), 16);
  const __m256i g1 = _mm256_srai_epi32(
      _mm256_add_epi32(multiply(_mm256_unpackhi_epi16(cb, cr), -22554, 18734), round), 16);
  g = _mm256_add_epi16(y, _mm256_sub_epi16(_mm256_packs_epi32(g0, g1), cr));
}

}  // namespace avx2

struct Avx2Pixels {
  using Excess = __m256i;

  static bool any(const Excess& excess) { return !_mm256_testz_si256(excess, excess); }

  // Transforms blocks a and b into samples side by side; used: how many zigzag positions may be
  // nonzero in either.
  __attribute__((always_inline)) static inline void transform(const int16_t* a, const int16_t* b,
                                                              int used, const Quant& quant,
                                                              uint8_t* out, size_t stride,
                                                              Excess& excess) {
    if (used > 10) {
      avx2::transform_pair<false>(a, b, quant, out, stride, excess);
    } else if (used > 1) {  // the upper left 4 x 4
      avx2::transform_pair<true>(a, b, quant, out, stride, excess);
    } else {
      const __m256i dc = _mm256_set_epi64x(0, 0, uint16_t(b[0]), uint16_t(a[0]));
      excess = _mm256_or_si256(
          excess, _mm256_subs_epu16(_mm256_abs_epi16(dc),
                                    _mm256_set_epi64x(0, 0, quant.limit[0], quant.limit[0])));
      const __m128i row = _mm_set_epi64x(int64_t(flat(b[0], quant)), int64_t(flat(a[0], quant)));
      for (size_t i = 0; i < 8; i++)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * stride), row);
    }
  }

  static void upsample_h(const uint8_t* in, uint8_t* out, int count) {
    const __m256i one = _mm256_set1_epi16(1), two = _mm256_set1_epi16(2);
    for (int i = 0; i < count; i += 16) {
      const __m256i t = avx2::triple(avx2::load16(in + i));
      const __m256i left = avx2::load16(in + i - 1), right = avx2::load16(in + i + 1);
      avx2::store_pairs(out + 2 * i,
                        _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(t, left), one), 2),
                        _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(t, right), two), 2));
    }
  }

  static void upsample_v(const uint8_t* near, const uint8_t* far, uint8_t* out, int count,
                         int bias) {
    const __m256i round = _mm256_set1_epi16(short(bias));
    for (int i = 0; i < count; i += 16) {
      const __m256i t =
          _mm256_add_epi16(avx2::triple(avx2::load16(near + i)), avx2::load16(far + i));
      const __m256i x = _mm256_srli_epi16(_mm256_add_epi16(t, round), 2);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm_packus_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
    }
  }

  static void upsample_hv(const uint8_t* near, const uint8_t* far, uint8_t* out, int count) {
    const __m256i eight = _mm256_set1_epi16(8), seven = _mm256_set1_epi16(7);
    const auto column = [&](int i) __attribute__((always_inline)) {
      return _mm256_add_epi16(avx2::triple(avx2::load16(near + i)), avx2::load16(far + i));
    };
    for (int i = 0; i < count; i += 16) {
      const __m256i t = avx2::triple(column(i)), left = column(i - 1), right = column(i + 1);
      avx2::store_pairs(out + 2 * i,
                        _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(t, left), eight), 4),
                        _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(t, right), seven), 4));
    }
  }

  static void color(const uint8_t* y, const uint8_t* cb, const uint8_t* cr, uint8_t* out,
                    int width) {
    for (int x = 0; x < width; x += 32) {
      const __m256i y8 = load32(y + x), cb8 = load32(cb + x), cr8 = load32(cr + x);
      __m256i r0, g0, b0, r1, g1, b1;
      avx2::color16<0>(y8, cb8, cr8, r0, g0, b0);
      avx2::color16<1>(y8, cb8, cr8, r1, g1, b1);
      avx2::store_rgb(_mm256_packus_epi16(r0, r1), _mm256_packus_epi16(g0, g1),
                      _mm256_packus_epi16(b0, b1), out + 3 * x, 3 * (width - x));
    }
  }

  static void gray(const uint8_t* y, uint8_t* out, int width) {
    for (int x = 0; x < width; x += 32) {
      const __m256i y8 = load32(y + x);
      avx2::store_rgb(y8, y8, y8, out + 3 * x, 3 * (width - x));
    }
  }

  // Copies bytes up to the next FF or the end, whichever comes first; `out` has room for 31 bytes
  // more.
  static void copy_until_ff(const uint8_t*& in, const uint8_t* end, uint8_t*& out) {
    const __m256i ff = _mm256_set1_epi8(-1);
    while (end - in >= 32) {
      const __m256i bytes = load32(in);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
      const uint32_t found = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, ff)));
      const int count = found ? __builtin_ctz(found) : 32;
      in += count;
      out += count;
      if (found) return;
    }
    while (in < end && *in != 0xFF) *out++ = *in++;
  }

 private:
  __attribute__((always_inline)) static inline __m256i load32(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }

  // Eight samples of a block that has a DC coefficient only.
  __attribute__((always_inline)) static inline uint64_t flat(int dc, const Quant& quant) {
    int value = (int16_t(int16_t(dc * quant.factor[0]) * 4) + 16) >> 5;
    value = value < -128 ? -128 : value > 127 ? 127 : value;
    return 0x0101010101010101u * uint64_t(value + 128);
  }
};

}  // namespace
}  // namespace stoker::jpeg
