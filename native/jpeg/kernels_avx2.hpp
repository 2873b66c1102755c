// The pixel kernels on 256-bit registers: two blocks, 16 chroma samples or 32 pixels at a time.
#pragma once

#include <immintrin.h>

#include "jpeg/kernels_simd.hpp"

namespace stoker::jpeg {
namespace {

struct Lanes256 {
  using V = __m256i;

  STOKER_KERNEL V zero() { return _mm256_setzero_si256(); }
  STOKER_KERNEL V set16(int x) { return _mm256_set1_epi16(short(x)); }
  STOKER_KERNEL V set32(int x) { return _mm256_set1_epi32(x); }
  STOKER_KERNEL V load(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const V*>(p));
  }
  STOKER_KERNEL V broadcast(const void* p) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(static_cast<const __m128i*>(p)));
  }

  STOKER_KERNEL V add16(V a, V b) { return _mm256_add_epi16(a, b); }
  STOKER_KERNEL V sub16(V a, V b) { return _mm256_sub_epi16(a, b); }
  STOKER_KERNEL V add32(V a, V b) { return _mm256_add_epi32(a, b); }
  STOKER_KERNEL V sub32(V a, V b) { return _mm256_sub_epi32(a, b); }
  STOKER_KERNEL V madd(V a, V b) { return _mm256_madd_epi16(a, b); }
  STOKER_KERNEL V mullo16(V a, V b) { return _mm256_mullo_epi16(a, b); }
  STOKER_KERNEL V mulhi16(V a, V b) { return _mm256_mulhi_epi16(a, b); }
  STOKER_KERNEL V mulhrs16(V a, V b) { return _mm256_mulhrs_epi16(a, b); }
  STOKER_KERNEL V abs16(V a) { return _mm256_abs_epi16(a); }
  STOKER_KERNEL V subs_u16(V a, V b) { return _mm256_subs_epu16(a, b); }
  STOKER_KERNEL V bit_or(V a, V b) { return _mm256_or_si256(a, b); }
  STOKER_KERNEL V bit_xor(V a, V b) { return _mm256_xor_si256(a, b); }
  template <int kShift>
  STOKER_KERNEL V srai16(V a) {
    return _mm256_srai_epi16(a, kShift);
  }
  template <int kShift>
  STOKER_KERNEL V srai32(V a) {
    return _mm256_srai_epi32(a, kShift);
  }
  STOKER_KERNEL V packs16(V a, V b) { return _mm256_packs_epi16(a, b); }
  STOKER_KERNEL V packus16(V a, V b) { return _mm256_packus_epi16(a, b); }
  STOKER_KERNEL V packs32(V a, V b) { return _mm256_packs_epi32(a, b); }
  STOKER_KERNEL V unpacklo8(V a, V b) { return _mm256_unpacklo_epi8(a, b); }
  STOKER_KERNEL V unpackhi8(V a, V b) { return _mm256_unpackhi_epi8(a, b); }
  STOKER_KERNEL V unpacklo16(V a, V b) { return _mm256_unpacklo_epi16(a, b); }
  STOKER_KERNEL V unpackhi16(V a, V b) { return _mm256_unpackhi_epi16(a, b); }
  STOKER_KERNEL V unpacklo32(V a, V b) { return _mm256_unpacklo_epi32(a, b); }
  STOKER_KERNEL V unpackhi32(V a, V b) { return _mm256_unpackhi_epi32(a, b); }
  STOKER_KERNEL V unpacklo64(V a, V b) { return _mm256_unpacklo_epi64(a, b); }
  STOKER_KERNEL V unpackhi64(V a, V b) { return _mm256_unpackhi_epi64(a, b); }

  // Eight coefficients of each block.
  STOKER_KERNEL V load_row(const int16_t* const* blocks, int at) {
    return _mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(blocks[0] + at))),
        _mm_load_si128(reinterpret_cast<const __m128i*>(blocks[1] + at)), 1);
  }

  // Each lane holds two rows of eight samples.
  STOKER_KERNEL void store_two_rows(V rows, uint8_t* out, size_t stride) {
    const V x = _mm256_permute4x64_epi64(rows, 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(x));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + stride), _mm256_extracti128_si256(x, 1));
  }

  // Interleaves 32 pixels into 96 bytes of which `bytes` (rounded up to 32) are stored.
  STOKER_KERNEL void store_rgb(V r, V g, V b, uint8_t* out, int bytes) {
    // Spread each channel over its three residues, then pick per byte: position i holds channel i
    // % 3.
    const auto everywhere = [](__m128i x) __attribute__((always_inline)) {
      return _mm256_broadcastsi128_si256(x);
    };
    const V spread_r =
        everywhere(_mm_setr_epi8(0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10, 5));
    const V spread_g =
        everywhere(_mm_setr_epi8(5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10));
    const V spread_b =
        everywhere(_mm_setr_epi8(10, 5, 0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15));
    const V second = everywhere(_mm_setr_epi8(0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0));
    const V third = everywhere(_mm_setr_epi8(0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0));
    r = _mm256_shuffle_epi8(r, spread_r);
    g = _mm256_shuffle_epi8(g, spread_g);
    b = _mm256_shuffle_epi8(b, spread_b);
    const V v0 = _mm256_blendv_epi8(_mm256_blendv_epi8(r, g, second), b, third);
    const V v1 = _mm256_blendv_epi8(_mm256_blendv_epi8(g, b, second), r, third);
    const V v2 = _mm256_blendv_epi8(_mm256_blendv_epi8(b, r, second), g, third);
    V* const to = reinterpret_cast<V*>(out);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(v0, v1, 0x20));
    if (bytes > 32) _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(v2, v0, 0x30));
    if (bytes > 64) _mm256_storeu_si256(to + 2, _mm256_permute2x128_si256(v1, v2, 0x31));
  }
};

// 16 samples as 16-bit numbers.
STOKER_KERNEL __m256i load16(const uint8_t* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

STOKER_KERNEL __m256i triple(__m256i x) { return _mm256_add_epi16(x, _mm256_add_epi16(x, x)); }

// Even and odd outputs, each in the low byte of 16 bits, side by side.
STOKER_KERNEL void store_pairs(uint8_t* out, __m256i even, __m256i odd) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_or_si256(even, _mm256_slli_epi16(odd, 8)));
}

struct Avx2Pixels {
  static constexpr int kBlocks = 2;
  using Excess = __m256i;

  static bool any(const Excess& excess) { return !_mm256_testz_si256(excess, excess); }

  // Transforms blocks into samples side by side; used: how many zigzag positions may be nonzero in
  // any.
  STOKER_KERNEL void transform(const int16_t* const* blocks, int used, const Quant& quant,
                               uint8_t* out, size_t stride, Excess& excess) {
    if (used > 10) {
      transform_blocks<Lanes256, false>(blocks, quant, out, stride, excess);
    } else if (used > 1) {  // the upper left 4 x 4
      transform_blocks<Lanes256, true>(blocks, quant, out, stride, excess);
    } else {
      const int16_t a = blocks[0][0], b = blocks[1][0];
      const __m256i dc = _mm256_set_epi64x(0, 0, uint16_t(b), uint16_t(a)),
                    limit = _mm256_set1_epi16(short(quant.limit[0]));
      excess = _mm256_or_si256(excess, _mm256_subs_epu16(_mm256_abs_epi16(dc), limit));
      const __m128i row = _mm_set_epi64x(int64_t(flat_row(b, quant)), int64_t(flat_row(a, quant)));
      for (size_t i = 0; i < 8; i++)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * stride), row);
    }
  }

  static void upsample_h(const uint8_t* in, uint8_t* out, int count) {
    const __m256i one = _mm256_set1_epi16(1), two = _mm256_set1_epi16(2);
    for (int i = 0; i < count; i += 16) {
      const __m256i t = triple(load16(in + i)), left = load16(in + i - 1),
                    right = load16(in + i + 1);
      store_pairs(out + 2 * i,
                  _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(t, left), one), 2),
                  _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(t, right), two), 2));
    }
  }

  static void upsample_v(const uint8_t* near, const uint8_t* far, uint8_t* out, int count,
                         int bias) {
    const __m256i round = _mm256_set1_epi16(short(bias));
    for (int i = 0; i < count; i += 16) {
      const __m256i t = _mm256_add_epi16(triple(load16(near + i)), load16(far + i));
      const __m256i x = _mm256_srli_epi16(_mm256_add_epi16(t, round), 2);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm_packus_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
    }
  }

  static void upsample_hv(const uint8_t* near, const uint8_t* far, uint8_t* out, int count) {
    const __m256i eight = _mm256_set1_epi16(8), seven = _mm256_set1_epi16(7);
    const auto column = [&](int i) __attribute__((always_inline)) {
      return _mm256_add_epi16(triple(load16(near + i)), load16(far + i));
    };
    for (int i = 0; i < count; i += 16) {
      const __m256i t = triple(column(i)), left = column(i - 1), right = column(i + 1);
      store_pairs(out + 2 * i,
                  _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(t, left), eight), 4),
                  _mm256_srli_epi16(_mm256_add_epi16(_mm256_add_epi16(t, right), seven), 4));
    }
  }

  static void color(const uint8_t* y, const uint8_t* cb, const uint8_t* cr, uint8_t* out,
                    int width) {
    color_line<Lanes256>(y, cb, cr, out, width);
  }

  static void gray(const uint8_t* y, uint8_t* out, int width) {
    gray_line<Lanes256>(y, out, width);
  }

  // Copies bytes up to the next FF or the end, whichever comes first; `out` has room for 31 bytes
  // more.
  static void copy_until_ff(const uint8_t*& in, const uint8_t* end, uint8_t*& out) {
    const __m256i ff = _mm256_set1_epi8(-1);
    while (end - in >= 32) {
      const __m256i bytes = Lanes256::load(in);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
      const uint32_t found = uint32_t(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, ff)));
      const int count = found ? __builtin_ctz(found) : 32;
      in += count;
      out += count;
      if (found) return;
    }
    while (in < end && *in != 0xFF) *out++ = *in++;
  }
};

}  // namespace
}  // namespace stoker::jpeg
