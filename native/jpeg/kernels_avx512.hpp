// The pixel kernels on 512-bit registers where that pays: four blocks or 64 pixels at a time.
#pragma once

#include <immintrin.h>

#include "jpeg/kernels_avx2.hpp"

namespace stoker::jpeg {
namespace {

// Where the bytes of 64 interleaved pixels come from; three registers of output.
struct Interleave {
  // Of r (0 to 63) and g (64 to 127), anything where b goes; and of b.
  alignas(64) uint8_t red_green[3][64];
  alignas(64) uint8_t blue[3][64];
  uint64_t is_blue[3];
  constexpr Interleave() : red_green(), blue(), is_blue() {
    for (int i = 0; i < 192; i++) {
      const int pixel = i / 3, channel = i % 3;
      red_green[i / 64][i % 64] = uint8_t(pixel + (channel == 1 ? 64 : 0));
      blue[i / 64][i % 64] = uint8_t(pixel);
      if (channel == 2) is_blue[i / 64] |= uint64_t{1} << (i % 64);
    }
  }
};
alignas(64) constexpr Interleave kInterleave;

struct Lanes512 {
  using V = __m512i;

  STOKER_KERNEL V zero() { return _mm512_setzero_si512(); }
  STOKER_KERNEL V set16(int x) { return _mm512_set1_epi16(short(x)); }
  STOKER_KERNEL V set32(int x) { return _mm512_set1_epi32(x); }
  STOKER_KERNEL V load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  STOKER_KERNEL V broadcast(const void* p) {
    return _mm512_broadcast_i32x4(_mm_load_si128(static_cast<const __m128i*>(p)));
  }

  STOKER_KERNEL V add16(V a, V b) { return _mm512_add_epi16(a, b); }
  STOKER_KERNEL V sub16(V a, V b) { return _mm512_sub_epi16(a, b); }
  STOKER_KERNEL V add32(V a, V b) { return _mm512_add_epi32(a, b); }
  STOKER_KERNEL V sub32(V a, V b) { return _mm512_sub_epi32(a, b); }
  STOKER_KERNEL V madd(V a, V b) { return _mm512_madd_epi16(a, b); }
  STOKER_KERNEL V mullo16(V a, V b) { return _mm512_mullo_epi16(a, b); }
  STOKER_KERNEL V mulhi16(V a, V b) { return _mm512_mulhi_epi16(a, b); }
  STOKER_KERNEL V mulhrs16(V a, V b) { return _mm512_mulhrs_epi16(a, b); }
  STOKER_KERNEL V abs16(V a) { return _mm512_abs_epi16(a); }
  STOKER_KERNEL V subs_u16(V a, V b) { return _mm512_subs_epu16(a, b); }
  STOKER_KERNEL V bit_or(V a, V b) { return _mm512_or_si512(a, b); }
  STOKER_KERNEL V bit_xor(V a, V b) { return _mm512_xor_si512(a, b); }
  template <int kShift>
  STOKER_KERNEL V srai16(V a) {
    return _mm512_srai_epi16(a, kShift);
  }
  template <int kShift>
  STOKER_KERNEL V srai32(V a) {
    return _mm512_srai_epi32(a, kShift);
  }
  STOKER_KERNEL V packs16(V a, V b) { return _mm512_packs_epi16(a, b); }
  STOKER_KERNEL V packus16(V a, V b) { return _mm512_packus_epi16(a, b); }
  STOKER_KERNEL V packs32(V a, V b) { return _mm512_packs_epi32(a, b); }
  STOKER_KERNEL V unpacklo8(V a, V b) { return _mm512_unpacklo_epi8(a, b); }
  STOKER_KERNEL V unpackhi8(V a, V b) { return _mm512_unpackhi_epi8(a, b); }
  STOKER_KERNEL V unpacklo16(V a, V b) { return _mm512_unpacklo_epi16(a, b); }
  STOKER_KERNEL V unpackhi16(V a, V b) { return _mm512_unpackhi_epi16(a, b); }
  STOKER_KERNEL V unpacklo32(V a, V b) { return _mm512_unpacklo_epi32(a, b); }
  STOKER_KERNEL V unpackhi32(V a, V b) { return _mm512_unpackhi_epi32(a, b); }
  STOKER_KERNEL V unpacklo64(V a, V b) { return _mm512_unpacklo_epi64(a, b); }
  STOKER_KERNEL V unpackhi64(V a, V b) { return _mm512_unpackhi_epi64(a, b); }

  STOKER_KERNEL V load_row(const int16_t* const* blocks, int at) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(Lanes256::load_row(blocks, at)),
                              Lanes256::load_row(blocks + 2, at), 1);
  }

  STOKER_KERNEL void store_two_rows(V rows, uint8_t* out, size_t stride) {
    const V x = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), rows);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(x));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + stride), _mm512_extracti64x4_epi64(x, 1));
  }

  // Stores the first `bytes` of 64 interleaved pixels, at most all 192.
  STOKER_KERNEL void store_rgb(V r, V g, V b, uint8_t* out, int bytes) {
#pragma GCC unroll 3
    for (int i = 0; i < 3; i++) {
      const V pairs = _mm512_permutex2var_epi8(r, _mm512_load_si512(kInterleave.red_green[i]), g);
      const V x = _mm512_mask_permutexvar_epi8(pairs, kInterleave.is_blue[i],
                                               _mm512_load_si512(kInterleave.blue[i]), b);
      const int left = bytes - 64 * i;
      if (left >= 64) {
        _mm512_storeu_si512(out + 64 * i, x);
      } else if (left > 0) {
        _mm512_mask_storeu_epi8(out + 64 * i, _bzhi_u64(~uint64_t{0}, uint32_t(left)), x);
      }
    }
  }
};

struct Avx512Pixels : Avx2Pixels {
  static constexpr int kBlocks = 4;
  using Excess = __m512i;

  static bool any(const Excess& excess) { return _mm512_test_epi64_mask(excess, excess) != 0; }

  STOKER_KERNEL void transform(const int16_t* const* blocks, int used, const Quant& quant,
                               uint8_t* out, size_t stride, Excess& excess) {
    if (used > 10) {
      transform_blocks<Lanes512, false>(blocks, quant, out, stride, excess);
    } else if (used > 1) {
      transform_blocks<Lanes512, true>(blocks, quant, out, stride, excess);
    } else {
      const int16_t dc[4] = {blocks[0][0], blocks[1][0], blocks[2][0], blocks[3][0]};
      const __m256i four =
          _mm256_setr_epi64x(uint16_t(dc[0]), uint16_t(dc[1]), uint16_t(dc[2]), uint16_t(dc[3]));
      const __m256i above =
          _mm256_subs_epu16(_mm256_abs_epi16(four), _mm256_set1_epi16(short(quant.limit[0])));
      excess = _mm512_or_si512(excess, _mm512_zextsi256_si512(above));
      const __m256i row =
          _mm256_setr_epi64x(int64_t(flat_row(dc[0], quant)), int64_t(flat_row(dc[1], quant)),
                             int64_t(flat_row(dc[2], quant)), int64_t(flat_row(dc[3], quant)));
      for (size_t i = 0; i < 8; i++)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * stride), row);
    }
  }

  static void color(const uint8_t* y, const uint8_t* cb, const uint8_t* cr, uint8_t* out,
                    int width) {
    color_line<Lanes512>(y, cb, cr, out, width);
  }

  static void gray(const uint8_t* y, uint8_t* out, int width) {
    gray_line<Lanes512>(y, out, width);
  }
};

}  // namespace
}  // namespace stoker::jpeg
