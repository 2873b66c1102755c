// Resampling with AVX-512 (VBMI and VNNI).
//
// A weight k is split exactly into three signed bytes, k = 65536 * c2 + 256 * c1 + c0, and dpbusd
// multiplies four pixels by four such digits straight from bytes; 32-bit additions wrap, and the
// final sum fits. Taps are taken in fours. Ring rows hold four image rows, a byte each.
#include <immintrin.h>

// GCC 12 takes the deliberately undefined registers inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <cstring>

#include "resample_kernels.hpp"

namespace stoker {
namespace {

#define STOKER_INLINE inline __attribute__((always_inline))

constexpr int kColumns = 5;    // outputs that share one 64-byte load: 5 columns x 3 channels
constexpr int kMostSteps = 8;  // longer windows take one column at a time

STOKER_INLINE int smaller(int a, int b) { return a < b ? a : b; }
STOKER_INLINE int larger(int a, int b) { return a > b ? a : b; }

STOKER_INLINE __m128i load16(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
STOKER_INLINE void store16(void* to, __m128i value) {
  _mm_storeu_si128(static_cast<__m128i*>(to), value);
}

// ---- Packed weights: three dwords (c2, c1, c0), each with one digit of four taps. Horizontal, not
// wide: three vectors per group of columns and step, whose dword 3 * column + channel serves that
// column.

// The lowest digit of every weight; `rest` becomes what the higher digits represent.
STOKER_INLINE __m128i take_digit(__m128i& rest) {
  const __m128i digit = _mm_srai_epi32(_mm_slli_epi32(rest, 24), 24);
  rest = _mm_srai_epi32(_mm_sub_epi32(rest, digit), 8);
  return digit;
}

STOKER_INLINE int32_t low_bytes(__m128i values) {
  return _mm_cvtsi128_si32(_mm_cvtepi32_epi8(values));
}

STOKER_INLINE void put_digits(int32_t* to, const int32_t* weights) {
  __m128i rest = load16(weights);
  const __m128i c0 = take_digit(rest), c1 = take_digit(rest);
  to[0] = low_bytes(rest);
  to[1] = low_bytes(c1);
  to[2] = low_bytes(c0);
}

void layout(const Axis& axis, AxisUse use, PackedAxis& packed) {
  const size_t count = static_cast<size_t>(axis.count);
  packed.steps = (axis.longest + 3) / 4;
  packed.offset_count = count;
  packed.weight_count = 3 * count * (packed.steps + 1);
  if (use == AxisUse::vertical_from_ring)
    ++packed.steps;  // the first tap may stand anywhere in four
  if (use != AxisUse::horizontal) return;
  packed.wide = packed.steps > kMostSteps;
  int last = 0;
  for (int g = 0; g < axis.count; g += kColumns) {
    int low = axis.first[g], high = low;
    for (int x = g; x < smaller(axis.count, g + kColumns); ++x) {
      low = smaller(low, axis.first[x]);
      high = larger(high, axis.first[x]);
    }
    // The four taps of a step must lie in one 64-byte load.
    if (3 * (high - low) + 12 > 64) packed.wide = true;
    last = larger(last, high);
  }
  packed.reach = 3 * last + 12 * (packed.steps - 1) + (packed.wide ? 16 : 64);
  if (!packed.wide) {
    const size_t groups = (count + kColumns - 1) / kColumns;
    packed.weight_count = groups * packed.steps * 48;
    packed.shuffle_count = groups * 64;
  }
}

void pack_wide(const Axis& axis, PackedAxis& packed) {
  int32_t* to = packed.weights;
  for (int x = 0; x < axis.count; ++x) {
    packed.offsets[x] = 3 * axis.first[x];
    const int32_t* weights = axis.weights + static_cast<size_t>(x) * axis.pitch;
    for (int q = 0; q < packed.steps; ++q, to += 3) put_digits(to, weights + 4 * q);
  }
}

void pack_narrow(const Axis& axis, PackedAxis& packed, uint8_t* work) {
  // All weights' digits first, 16 at a time: three arrays of bytes.
  const size_t total = static_cast<size_t>(axis.count) * axis.pitch, plane = total + 64;
  for (size_t i = 0; i < total; i += 16) {
    const __mmask16 inside =
        static_cast<__mmask16>(total - i >= 16 ? 0xffff : (1 << (total - i)) - 1);
    __m512i rest = _mm512_maskz_loadu_epi32(inside, axis.weights + i);
    const __m128i c0 = _mm512_cvtepi32_epi8(rest);
    rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, _mm512_cvtepi8_epi32(c0)), 8);
    const __m128i c1 = _mm512_cvtepi32_epi8(rest);
    rest = _mm512_srai_epi32(_mm512_sub_epi32(rest, _mm512_cvtepi8_epi32(c1)), 8);
    store16(work + i, _mm512_cvtepi32_epi8(rest));
    store16(work + plane + i, c1);
    store16(work + 2 * plane + i, c0);
  }
  const __m128i taps = _mm_setr_epi8(0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, 0, 0, 0, 0);
  int32_t* to = packed.weights;
  uint8_t* shuffle = packed.shuffles;
  for (int g = 0; kColumns * g < axis.count; ++g, to += 48 * packed.steps, shuffle += 64) {
    const int columns = smaller(kColumns, axis.count - kColumns * g);
    int low = axis.first[kColumns * g];
    for (int i = 1; i < columns; ++i) low = smaller(low, axis.first[kColumns * g + i]);
    packed.offsets[g] = 3 * low;
    if (columns < kColumns) {
      std::memset(shuffle, 0, 64);
      std::memset(to, 0, sizeof(int32_t) * 48 * packed.steps);
    }
    for (int i = 0; i < columns; ++i) {
      const int x = kColumns * g + i;
      const int shift = 3 * (axis.first[x] - low);
      const __m128i indexes = _mm_add_epi8(taps, _mm_set1_epi8(static_cast<char>(shift)));
      _mm_mask_storeu_epi8(shuffle + 12 * i, i < 4 ? 0xffff : 0x0fff, indexes);
      for (int q = 0; q < packed.steps; ++q) {
        for (int digit = 0; digit < 3; ++digit) {
          int32_t four;
          std::memcpy(&four, work + digit * plane + static_cast<size_t>(x) * axis.pitch + 4 * q, 4);
          // Writes one dword more than it should; the next column overwrites it, and the last dword
          // of a vector meets pixels of no column.
          store16(to + 48 * q + 16 * digit + 3 * i, _mm_set1_epi32(four));
        }
      }
    }
    if (columns == kColumns) std::memset(shuffle + 60, 0, 4);
  }
}

void pack(const Axis& axis, AxisUse use, PackedAxis& packed, uint8_t* work) {
  if (use == AxisUse::horizontal) {
    packed.wide ? pack_wide(axis, packed) : pack_narrow(axis, packed, work);
    return;
  }
  for (int y = 0; y < axis.count; ++y) {
    const int shift = use == AxisUse::vertical_from_ring ? axis.first[y] & 3 : 0;
    packed.offsets[y] = axis.first[y] >> 2;
    packed.groups[y] = (shift + axis.taps[y] + 3) >> 2;
    const int32_t* weights = axis.weights + static_cast<size_t>(y) * axis.pitch;
    int32_t* to = packed.weights + static_cast<size_t>(y) * packed.steps * 3;
    for (int q = 0; q < packed.groups[y]; ++q, to += 3) {
      const int t = 4 * q - shift;
      if (t >= 0 && t + 4 <= axis.pitch) {
        put_digits(to, weights + t);
        continue;
      }
      int32_t four[4];
      for (int i = 0; i < 4; ++i) {
        four[i] = t + i >= 0 && t + i < axis.taps[y] ? weights[t + i] : 0;
      }
      put_digits(to, four);
    }
  }
}

// ---- Passes

STOKER_INLINE __m512i rounding() { return _mm512_set1_epi32(1 << (kWeightBits - 1 - 16)); }

// Adds the products of one vector of four taps per dword.
struct Sum {
  __m512i s2 = rounding(), s1 = _mm512_setzero_si512(), s0 = _mm512_setzero_si512();
  STOKER_INLINE void add(__m512i pixels, __m512i c2, __m512i c1, __m512i c0) {
    s2 = _mm512_dpbusd_epi32(s2, pixels, c2);
    s1 = _mm512_dpbusd_epi32(s1, pixels, c1);
    s0 = _mm512_dpbusd_epi32(s0, pixels, c0);
  }
  STOKER_INLINE __m512i total() const {
    const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(s2, 8), s1);
    return _mm512_srai_epi32(_mm512_add_epi32(_mm512_slli_epi32(high, 8), s0), kWeightBits);
  }
};

template <bool kClip>
STOKER_INLINE __m512i clipped(__m512i value) {
  if (!kClip) return value;
  return _mm512_min_epi32(_mm512_max_epi32(value, _mm512_setzero_si512()), _mm512_set1_epi32(255));
}

STOKER_INLINE __m512i interleaved(__m512i a, __m512i b, __m512i c, __m512i d) {
  return _mm512_or_si512(_mm512_or_si512(a, _mm512_slli_epi32(b, 8)),
                         _mm512_or_si512(_mm512_slli_epi32(c, 16), _mm512_slli_epi32(d, 24)));
}

// Five columns per vector, the steps known: one accumulator per row, digit after digit.
template <int kSteps, bool kClip>
void horizontal_short(const Axis& axis, const PackedAxis& packed, const uint8_t* const* rows,
                      uint32_t* ring) {
  const uint8_t *row0 = rows[0], *row1 = rows[1], *row2 = rows[2], *row3 = rows[3];
  // Locals, because the compiler must assume that the stores below change what it can't see.
  const int32_t *weights = packed.weights, *offsets = packed.offsets;
  const uint8_t* shuffle = packed.shuffles;
  const int groups = (axis.count + kColumns - 1) / kColumns;
  for (int g = 0; g < groups; ++g, weights += 48 * kSteps, shuffle += 64, ring += 15) {
    const ptrdiff_t offset = offsets[g];
    const __m512i index = _mm512_load_si512(shuffle);
    __m512i p0[kSteps], p1[kSteps], p2[kSteps], p3[kSteps];
#pragma GCC unroll 4
    for (int q = 0; q < kSteps; ++q) {
      const ptrdiff_t at = offset + 12 * q;
      p0[q] = _mm512_permutexvar_epi8(index, _mm512_loadu_si512(row0 + at));
      p1[q] = _mm512_permutexvar_epi8(index, _mm512_loadu_si512(row1 + at));
      p2[q] = _mm512_permutexvar_epi8(index, _mm512_loadu_si512(row2 + at));
      p3[q] = _mm512_permutexvar_epi8(index, _mm512_loadu_si512(row3 + at));
    }
    __m512i a = rounding(), b = a, c = a, d = a;
#pragma GCC unroll 3
    for (int digit = 0; digit < 3; ++digit) {
      if (digit > 0) {
        a = _mm512_slli_epi32(a, 8);
        b = _mm512_slli_epi32(b, 8);
        c = _mm512_slli_epi32(c, 8);
        d = _mm512_slli_epi32(d, 8);
      }
#pragma GCC unroll 4
      for (int q = 0; q < kSteps; ++q) {
        const __m512i k = _mm512_load_si512(weights + 48 * q + 16 * digit);
        a = _mm512_dpbusd_epi32(a, p0[q], k);
        b = _mm512_dpbusd_epi32(b, p1[q], k);
        c = _mm512_dpbusd_epi32(c, p2[q], k);
        d = _mm512_dpbusd_epi32(d, p3[q], k);
      }
    }
    a = clipped<kClip>(_mm512_srai_epi32(a, kWeightBits));
    b = clipped<kClip>(_mm512_srai_epi32(b, kWeightBits));
    c = clipped<kClip>(_mm512_srai_epi32(c, kWeightBits));
    d = clipped<kClip>(_mm512_srai_epi32(d, kWeightBits));
    _mm512_storeu_si512(ring, interleaved(a, b, c, d));
  }
}

// Five columns per vector, any number of steps.
template <bool kClip>
void horizontal_long(const Axis& axis, const PackedAxis& packed, const uint8_t* const* rows,
                     uint32_t* ring) {
  // Locals, because the compiler must assume that the stores below change what it can't see.
  const int32_t *weights = packed.weights, *offsets = packed.offsets;
  const uint8_t* shuffle = packed.shuffles;
  const int groups = (axis.count + kColumns - 1) / kColumns;
  const int steps = packed.steps;
  for (int g = 0; g < groups; ++g, shuffle += 64, ring += 15) {
    ptrdiff_t offset = offsets[g];
    const __m512i index = _mm512_load_si512(shuffle);
    Sum sums[4];
    for (int q = 0; q < steps; ++q, weights += 48, offset += 12) {
      const __m512i c2 = _mm512_load_si512(weights), c1 = _mm512_load_si512(weights + 16),
                    c0 = _mm512_load_si512(weights + 32);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        sums[i].add(_mm512_permutexvar_epi8(index, _mm512_loadu_si512(rows[i] + offset)), c2, c1,
                    c0);
      }
    }
    _mm512_storeu_si512(
        ring, interleaved(clipped<kClip>(sums[0].total()), clipped<kClip>(sums[1].total()),
                          clipped<kClip>(sums[2].total()), clipped<kClip>(sums[3].total())));
  }
}

// One column of four rows per vector.
template <bool kClip>
void horizontal_wide(const Axis& axis, const PackedAxis& packed, const uint8_t* const* rows,
                     uint32_t* ring) {
  const __m512i order =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, -1, -1, -1, -1));
  const __m128i transposed = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const uint8_t *row0 = rows[0], *row1 = rows[1], *row2 = rows[2], *row3 = rows[3];
  const int32_t *weights = packed.weights, *offsets = packed.offsets;
  const int count = axis.count, steps = packed.steps;
  for (int x = 0; x < count; ++x) {
    ptrdiff_t offset = offsets[x];
    Sum sum;
    for (int q = 0; q < steps; ++q, weights += 3, offset += 12) {
      const __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(load16(row0 + offset)),
                                                load16(row1 + offset), 1);
      const __m256i b = _mm256_inserti128_si256(_mm256_castsi128_si256(load16(row2 + offset)),
                                                load16(row3 + offset), 1);
      const __m512i pixels = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
      sum.add(_mm512_shuffle_epi8(pixels, order), _mm512_set1_epi32(weights[0]),
              _mm512_set1_epi32(weights[1]), _mm512_set1_epi32(weights[2]));
    }
    const __m128i bytes = _mm512_cvtepi32_epi8(clipped<kClip>(sum.total()));
    store16(ring + 3 * x, _mm_shuffle_epi8(bytes, transposed));
  }
}

template <bool kClip>
void horizontal_any(const Axis& axis, const PackedAxis& packed, const uint8_t* const* rows,
                    uint32_t* ring) {
  if (packed.wide) return horizontal_wide<kClip>(axis, packed, rows, ring);
  switch (packed.steps) {
    case 1: return horizontal_short<1, kClip>(axis, packed, rows, ring);
    case 2: return horizontal_short<2, kClip>(axis, packed, rows, ring);
    case 3: return horizontal_short<3, kClip>(axis, packed, rows, ring);
    case 4: return horizontal_short<4, kClip>(axis, packed, rows, ring);
    default: return horizontal_long<kClip>(axis, packed, rows, ring);
  }
}

void horizontal(const Axis& axis, const PackedAxis& packed, const uint8_t* const* rows,
                uint32_t* const* ring) {
  if (axis.signed_weights) {
    horizontal_any<true>(axis, packed, rows, ring[0]);
  } else {
    horizontal_any<false>(axis, packed, rows, ring[0]);
  }
}

// kVectors * 16 bytes of one output row.
template <int kGroups, int kVectors, bool kClip>
STOKER_INLINE void vertical_block(const int32_t* weights, int any, const uint32_t* const* ring,
                                  int i, uint8_t* out) {
  const int groups = kGroups ? kGroups : any;
  Sum sums[kVectors];
  for (int q = 0; q < groups; ++q) {
    const __m512i c2 = _mm512_set1_epi32(weights[3 * q]),
                  c1 = _mm512_set1_epi32(weights[3 * q + 1]),
                  c0 = _mm512_set1_epi32(weights[3 * q + 2]);
#pragma GCC unroll 4
    for (int u = 0; u < kVectors; ++u) {
      sums[u].add(_mm512_load_si512(ring[q] + i + 16 * u), c2, c1, c0);
    }
  }
#pragma GCC unroll 4
  for (int u = 0; u < kVectors; ++u) {
    const __m512i total = sums[u].total();
    store16(out + i + 16 * u,
            kClip ? _mm512_cvtusepi32_epi8(_mm512_max_epi32(total, _mm512_setzero_si512()))
                  : _mm512_cvtepi32_epi8(total));
  }
}

template <int kGroups, bool kClip>
void vertical_from_ring_with(const int32_t* weights, int groups, const uint32_t* const* ring,
                             int bytes, uint8_t* out) {
  int i = 0;
  for (; i + 48 < bytes; i += 64) {
    vertical_block<kGroups, 4, kClip>(weights, groups, ring, i, out);
  }
  for (; i < bytes; i += 16) vertical_block<kGroups, 1, kClip>(weights, groups, ring, i, out);
}

template <bool kClip>
void vertical_from_ring_groups(const int32_t* weights, int groups, const uint32_t* const* ring,
                               int bytes, uint8_t* out) {
  switch (groups) {
    case 1: return vertical_from_ring_with<1, kClip>(weights, groups, ring, bytes, out);
    case 2: return vertical_from_ring_with<2, kClip>(weights, groups, ring, bytes, out);
    case 3: return vertical_from_ring_with<3, kClip>(weights, groups, ring, bytes, out);
    default: return vertical_from_ring_with<0, kClip>(weights, groups, ring, bytes, out);
  }
}

void vertical_from_ring(const Axis& axis, const PackedAxis& packed, int y,
                        const uint32_t* const* ring, int bytes, uint8_t* out) {
  const int32_t* weights = packed.weights + static_cast<size_t>(y) * packed.steps * 3;
  if (axis.signed_weights) {
    vertical_from_ring_groups<true>(weights, packed.groups[y], ring, bytes, out);
  } else {
    vertical_from_ring_groups<false>(weights, packed.groups[y], ring, bytes, out);
  }
}

template <int kGroups>
void vertical_from_source_with(const int32_t* weights, int any, const uint8_t* const* rows,
                               int bytes, uint8_t* out) {
  const int groups = kGroups ? kGroups : any;
  for (int i = 0; i < bytes; i += 64) {
    const int left = bytes - i;
    const __mmask64 inside = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    Sum sums[4];
    for (int q = 0; q < groups; ++q) {
      const __m512i c2 = _mm512_set1_epi32(weights[3 * q]),
                    c1 = _mm512_set1_epi32(weights[3 * q + 1]),
                    c0 = _mm512_set1_epi32(weights[3 * q + 2]);
      const uint8_t* const* four = rows + 4 * q;
      const __m512i a = _mm512_maskz_loadu_epi8(inside, four[0] + i),
                    b = _mm512_maskz_loadu_epi8(inside, four[1] + i),
                    c = _mm512_maskz_loadu_epi8(inside, four[2] + i),
                    d = _mm512_maskz_loadu_epi8(inside, four[3] + i);
      const __m512i ab0 = _mm512_unpacklo_epi8(a, b), ab1 = _mm512_unpackhi_epi8(a, b);
      const __m512i cd0 = _mm512_unpacklo_epi8(c, d), cd1 = _mm512_unpackhi_epi8(c, d);
      sums[0].add(_mm512_unpacklo_epi16(ab0, cd0), c2, c1, c0);
      sums[1].add(_mm512_unpackhi_epi16(ab0, cd0), c2, c1, c0);
      sums[2].add(_mm512_unpacklo_epi16(ab1, cd1), c2, c1, c0);
      sums[3].add(_mm512_unpackhi_epi16(ab1, cd1), c2, c1, c0);
    }
    _mm512_storeu_si512(out + i,
                        _mm512_packus_epi16(_mm512_packs_epi32(sums[0].total(), sums[1].total()),
                                            _mm512_packs_epi32(sums[2].total(), sums[3].total())));
  }
}

void vertical_from_source(const Axis&, const PackedAxis& packed, int y, const uint8_t* const* rows,
                          int bytes, uint8_t* out) {
  const int32_t* weights = packed.weights + static_cast<size_t>(y) * packed.steps * 3;
  const int groups = packed.groups[y];
  switch (groups) {
    case 1: return vertical_from_source_with<1>(weights, groups, rows, bytes, out);
    case 2: return vertical_from_source_with<2>(weights, groups, rows, bytes, out);
    default: return vertical_from_source_with<0>(weights, groups, rows, bytes, out);
  }
}

void extract(const uint32_t* ring, int index, int bytes, uint8_t* out) {
  const __m128i shift = _mm_cvtsi32_si128(8 * index);
  for (int i = 0; i < bytes; i += 16) {
    store16(out + i, _mm512_cvtepi32_epi8(_mm512_srl_epi32(_mm512_load_si512(ring + i), shift)));
  }
}

}  // namespace

extern const ResampleKernels kResampleAvx512;
const ResampleKernels kResampleAvx512 = {
    4,      build_weights_avx2, layout, pack, horizontal, vertical_from_ring, vertical_from_source,
    extract};

}  // namespace stoker
