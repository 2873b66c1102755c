// Resampling with AVX2.
//
// A weight k is split exactly into two signed 16-bit numbers, k = 256 * high + low with low in
// 0..255, so that two multiply-adds of 16-bit pairs give the exact 32-bit sum (high << 8) + low:
// 32-bit additions wrap, and the final sum fits. Taps are taken in pairs. Ring rows hold two image
// rows, 16 bits each.
#include <immintrin.h>

#include "resample_kernels.hpp"

namespace stoker {
namespace {

#define STOKER_INLINE inline __attribute__((always_inline))

STOKER_INLINE int smaller(int a, int b) { return a < b ? a : b; }
STOKER_INLINE int larger(int a, int b) { return a > b ? a : b; }

STOKER_INLINE __m256i load32(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
STOKER_INLINE void store32(void* to, __m256i value) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), value);
}
STOKER_INLINE __m128i load16(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
STOKER_INLINE void store16(void* to, __m128i value) {
  _mm_storeu_si128(static_cast<__m128i*>(to), value);
}

// ---- Packed weights: per output and pair of taps a dword of high and one of low halves.

STOKER_INLINE int32_t pair(int32_t a, int32_t b) {
  return static_cast<int32_t>((static_cast<uint32_t>(a) & 0xffff) | static_cast<uint32_t>(b) << 16);
}

STOKER_INLINE void put_pair(int32_t* to, int32_t a, int32_t b) {
  to[0] = pair(a >> 8, b >> 8);
  to[1] = pair(a & 255, b & 255);
}

// One 16-byte load holds five taps, which would otherwise take two.
STOKER_INLINE bool five_taps(const Axis& axis) { return axis.longest == 5; }

void layout(const Axis& axis, AxisUse use, PackedAxis& packed) {
  const size_t count = static_cast<size_t>(axis.count);
  packed.steps = (axis.longest + 1) / 2;
  if (use == AxisUse::horizontal) {
    int last = 0;
    for (int x = 0; x < axis.count; ++x) last = larger(last, axis.first[x]);
    packed.reach = 3 * last + 16 + (five_taps(axis) ? 0 : 12 * ((packed.steps - 1) / 2));
  } else if (use == AxisUse::vertical_from_ring) {
    ++packed.steps;  // the first tap may be the second of a ring row
  }
  packed.offset_count = count;
  packed.weight_count = 2 * count * packed.steps;
}

void pack(const Axis& axis, AxisUse use, PackedAxis& packed, uint8_t*) {
  for (int i = 0; i < axis.count; ++i) {
    const int32_t* weights = axis.weights + static_cast<size_t>(i) * axis.pitch;
    int32_t* to = packed.weights + static_cast<size_t>(i) * packed.steps * 2;
    const int taps = axis.taps[i];
    if (use == AxisUse::horizontal) {
      packed.offsets[i] = 3 * axis.first[i];
      for (int q = 0; q < packed.steps; ++q)
        put_pair(to + 2 * q, weights[2 * q], weights[2 * q + 1]);
      continue;
    }
    const int shift = use == AxisUse::vertical_from_ring ? axis.first[i] & 1 : 0;
    packed.offsets[i] = axis.first[i] >> 1;
    packed.groups[i] = (shift + taps + 1) >> 1;
    for (int q = 0; q < packed.groups[i]; ++q) {
      const int t = 2 * q - shift;
      put_pair(to + 2 * q, t >= 0 ? weights[t] : 0, t + 1 < taps ? weights[t + 1] : 0);
    }
  }
}

// ---- Passes

STOKER_INLINE __m256i rounding() { return _mm256_set1_epi32(1 << (kWeightBits - 1 - 8)); }

// Adds the products of one vector of pairs.
struct Sum {
  __m256i high = rounding(), low = _mm256_setzero_si256();
  STOKER_INLINE void add(__m256i pairs, __m256i weights_high, __m256i weights_low) {
    high = _mm256_add_epi32(high, _mm256_madd_epi16(pairs, weights_high));
    low = _mm256_add_epi32(low, _mm256_madd_epi16(pairs, weights_low));
    // Keeps GCC from regrouping the additions, which makes it spill registers: 7 to 17 % of a
    // resize.
    asm("" : "+x"(high), "+x"(low));
  }
  STOKER_INLINE __m256i total() const {
    return _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(high, 8), low), kWeightBits);
  }
};

// One column of two rows per register: 3 of 4 lanes in each half. kSteps 0: any number.
template <int kSteps, bool kClip, bool kFive>
void horizontal_with(const Axis& axis, const PackedAxis& packed, const uint8_t* const* rows,
                     uint32_t* ring0, uint32_t* ring1) {
  const int steps = kSteps ? kSteps : packed.steps;
  const uint8_t *row0 = rows[0], *row1 = rows[1], *row2 = rows[2], *row3 = rows[3];
  constexpr char n = -1;
  // The pairs of taps (0, 1), (2, 3) and (4, none), each for red, green and blue.
  const __m256i first =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, n, 3, n, 1, n, 4, n, 2, n, 5, n, n, n, n, n));
  const __m256i second =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(6, n, 9, n, 7, n, 10, n, 8, n, 11, n, n, n, n, n));
  const __m256i third =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(12, n, n, n, 13, n, n, n, 14, n, n, n, n, n, n, n));
  const __m256i interleave = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  // Locals, because the compiler must assume that the stores below change what it can't see.
  const int32_t *weights = packed.weights, *offsets = packed.offsets;
  const int count = axis.count;
  for (int x = 0; x < count; ++x, weights += 2 * steps, ring0 += 3, ring1 += 3) {
    Sum even, odd;  // rows 0 and 2, rows 1 and 3
    for (int q = 0; q < steps; q += 2) {
      const ptrdiff_t offset = offsets[x] + ptrdiff_t{6} * q;
      const __m256i a = _mm256_inserti128_si256(_mm256_castsi128_si256(load16(row0 + offset)),
                                                load16(row2 + offset), 1);
      const __m256i b = _mm256_inserti128_si256(_mm256_castsi128_si256(load16(row1 + offset)),
                                                load16(row3 + offset), 1);
      auto step = [&](__m256i order, int k) __attribute__((always_inline)) {
        const __m256i high = _mm256_set1_epi32(weights[2 * k]);
        const __m256i low = _mm256_set1_epi32(weights[2 * k + 1]);
        even.add(_mm256_shuffle_epi8(a, order), high, low);
        odd.add(_mm256_shuffle_epi8(b, order), high, low);
      };
      step(first, q);
      if (q + 1 < steps) step(second, q + 1);
      if (kFive) {
        step(third, 2);
        break;
      }
    }
    __m256i both;
    if (kClip) {  // words a0 .. a3 b0 .. b3 in each half; packing clips at 0
      both = _mm256_packus_epi32(even.total(), odd.total());
      both = _mm256_shuffle_epi8(_mm256_min_epu16(both, _mm256_set1_epi16(255)), interleave);
    } else {
      both = _mm256_or_si256(even.total(), _mm256_slli_epi32(odd.total(), 16));
    }
    store16(ring0, _mm256_castsi256_si128(both));
    store16(ring1, _mm256_extracti128_si256(both, 1));
  }
}

template <bool kClip>
void horizontal_steps(const Axis& axis, const PackedAxis& packed, const uint8_t* const* rows,
                      uint32_t* ring0, uint32_t* ring1) {
  if (five_taps(axis)) return horizontal_with<3, kClip, true>(axis, packed, rows, ring0, ring1);
  switch (packed.steps) {
    case 1: return horizontal_with<1, kClip, false>(axis, packed, rows, ring0, ring1);
    case 2: return horizontal_with<2, kClip, false>(axis, packed, rows, ring0, ring1);
    case 3: return horizontal_with<3, kClip, false>(axis, packed, rows, ring0, ring1);
    case 4: return horizontal_with<4, kClip, false>(axis, packed, rows, ring0, ring1);
    case 5: return horizontal_with<5, kClip, false>(axis, packed, rows, ring0, ring1);
    case 6: return horizontal_with<6, kClip, false>(axis, packed, rows, ring0, ring1);
    case 7: return horizontal_with<7, kClip, false>(axis, packed, rows, ring0, ring1);
    case 8: return horizontal_with<8, kClip, false>(axis, packed, rows, ring0, ring1);
    default: return horizontal_with<0, kClip, false>(axis, packed, rows, ring0, ring1);
  }
}

void horizontal(const Axis& axis, const PackedAxis& packed, const uint8_t* const* rows,
                uint32_t* const* ring) {
  if (axis.signed_weights) {
    horizontal_steps<true>(axis, packed, rows, ring[0], ring[1]);
  } else {
    horizontal_steps<false>(axis, packed, rows, ring[0], ring[1]);
  }
}

// Undoes the lane order of packing four vectors of dwords to bytes.
STOKER_INLINE __m256i in_order(__m256i packed) {
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

STOKER_INLINE __m256i to_bytes(__m256i a, __m256i b, __m256i c, __m256i d) {
  return _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
}

template <int kGroups>
void vertical_from_ring_with(const int32_t* weights, int any, const uint32_t* const* ring,
                             int bytes, uint8_t* out) {
  const int groups = kGroups ? kGroups : any;
  for (int i = 0; i < bytes; i += 32) {
    Sum s0, s1, s2, s3;
    for (int q = 0; q < groups; ++q) {
      const uint32_t* from = ring[q] + i;
      const __m256i high = _mm256_set1_epi32(weights[2 * q]);
      const __m256i low = _mm256_set1_epi32(weights[2 * q + 1]);
      s0.add(load32(from), high, low);
      s1.add(load32(from + 8), high, low);
      s2.add(load32(from + 16), high, low);
      s3.add(load32(from + 24), high, low);
    }
    store32(out + i, in_order(to_bytes(s0.total(), s1.total(), s2.total(), s3.total())));
  }
}

void vertical_from_ring(const Axis&, const PackedAxis& packed, int y, const uint32_t* const* ring,
                        int bytes, uint8_t* out) {
  const int32_t* weights = packed.weights + static_cast<size_t>(y) * packed.steps * 2;
  const int groups = packed.groups[y];
  switch (groups) {
    case 1: return vertical_from_ring_with<1>(weights, groups, ring, bytes, out);
    case 2: return vertical_from_ring_with<2>(weights, groups, ring, bytes, out);
    case 3: return vertical_from_ring_with<3>(weights, groups, ring, bytes, out);
    case 4: return vertical_from_ring_with<4>(weights, groups, ring, bytes, out);
    default: return vertical_from_ring_with<0>(weights, groups, ring, bytes, out);
  }
}

template <int kGroups>
void vertical_from_source_with(const int32_t* weights, int any, const uint8_t* const* rows,
                               int bytes, uint8_t* out) {
  const int groups = kGroups ? kGroups : any;
  const __m256i zero = _mm256_setzero_si256();
  for (int next = 0; next < bytes; next += 32) {
    const int i = smaller(next, bytes - 32);  // the last step overlaps the one before
    Sum s0, s1, s2, s3;
    for (int q = 0; q < groups; ++q) {
      const __m256i high = _mm256_set1_epi32(weights[2 * q]);
      const __m256i low = _mm256_set1_epi32(weights[2 * q + 1]);
      const __m256i a = load32(rows[2 * q] + i), b = load32(rows[2 * q + 1] + i);
      const __m256i ab0 = _mm256_unpacklo_epi8(a, b), ab1 = _mm256_unpackhi_epi8(a, b);
      s0.add(_mm256_unpacklo_epi8(ab0, zero), high, low);
      s1.add(_mm256_unpackhi_epi8(ab0, zero), high, low);
      s2.add(_mm256_unpacklo_epi8(ab1, zero), high, low);
      s3.add(_mm256_unpackhi_epi8(ab1, zero), high, low);
    }
    store32(out + i, to_bytes(s0.total(), s1.total(), s2.total(), s3.total()));
  }
}

void vertical_from_source(const Axis& axis, const PackedAxis& packed, int y,
                          const uint8_t* const* rows, int bytes, uint8_t* out) {
  if (bytes < 32) {  // rows shorter than a register
    const int32_t* weights = axis.weights + static_cast<size_t>(y) * axis.pitch;
    for (int i = 0; i < bytes; ++i) {
      int32_t sum = 1 << (kWeightBits - 1);
      for (int t = 0; t < axis.taps[y]; ++t) sum += rows[t][i] * weights[t];
      out[i] = static_cast<uint8_t>(smaller(larger(sum >> kWeightBits, 0), 255));
    }
    return;
  }
  const int32_t* weights = packed.weights + static_cast<size_t>(y) * packed.steps * 2;
  const int groups = packed.groups[y];
  switch (groups) {
    case 1: return vertical_from_source_with<1>(weights, groups, rows, bytes, out);
    case 2: return vertical_from_source_with<2>(weights, groups, rows, bytes, out);
    case 3: return vertical_from_source_with<3>(weights, groups, rows, bytes, out);
    case 4: return vertical_from_source_with<4>(weights, groups, rows, bytes, out);
    default: return vertical_from_source_with<0>(weights, groups, rows, bytes, out);
  }
}

void extract(const uint32_t* ring, int index, int bytes, uint8_t* out) {
  const __m128i shift = _mm_cvtsi32_si128(16 * index);
  const __m256i low = _mm256_set1_epi32(255);
  for (int i = 0; i < bytes; i += 32) {
    auto values = [&](int k) __attribute__((always_inline)) {
      return _mm256_and_si256(_mm256_srl_epi32(load32(ring + i + 8 * k), shift), low);
    };
    store32(out + i, in_order(to_bytes(values(0), values(1), values(2), values(3))));
  }
}

}  // namespace

extern const ResampleKernels kResampleAvx2;
const ResampleKernels kResampleAvx2 = {
    2,      build_weights_avx2, layout, pack, horizontal, vertical_from_ring, vertical_from_source,
    extract};

}  // namespace stoker
