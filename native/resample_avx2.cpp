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

// ---- Weights: build_weights() for four outputs at a time. The operations and their order are the
// scalar code's, without fused ones; see resample_tables.cpp.

STOKER_INLINE __m256d number(double value) { return _mm256_set1_pd(value); }

// sin(pi x) to 1e-13, for |x| < 4: Taylor's series about the nearest integer.
STOKER_INLINE __m256d sine_of_pi(__m256d x) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m256d whole = _mm256_round_pd(x, nearest), rest = _mm256_sub_pd(x, whole);
  const __m256d y = _mm256_mul_pd(rest, number(3.14159265358979323846));
  const __m256d square = _mm256_mul_pd(y, y);
  __m256d sum = number(1.0);
  for (int k = 18; k > 0; k -= 2) {  // 1 - y^2 / (2 * 3) * (1 - y^2 / (4 * 5) * ( ...
    sum = _mm256_sub_pd(number(1.0),
                        _mm256_mul_pd(_mm256_mul_pd(square, number(1.0 / (k * (k + 1.0)))), sum));
  }
  const __m256i odd = _mm256_slli_epi64(_mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(whole)), 63);
  return _mm256_xor_pd(_mm256_mul_pd(y, sum), _mm256_castsi256_pd(odd));
}

// The trigonometric filters are approximations: see Note [Doubtful weights].
constexpr bool is_trigonometric(Filter filter) {
  return filter == Filter::hamming || filter == Filter::lanczos;
}

template <Filter kFilter>
STOKER_INLINE __m256d trigonometric_value(__m256d x) {
  const __m256d one = number(1.0), pi = number(3.14159265358979323846);
  const __m256d zero = _mm256_cmp_pd(x, number(0.0), _CMP_EQ_OQ);
  __m256d value, inside;
  if (kFilter == Filter::hamming) {
    x = _mm256_andnot_pd(number(-0.0), x);
    inside = _mm256_cmp_pd(x, one, _CMP_LT_OQ);
    const __m256d cosine = sine_of_pi(_mm256_add_pd(x, number(0.5)));
    value = _mm256_mul_pd(_mm256_div_pd(sine_of_pi(x), _mm256_mul_pd(x, pi)),
                          _mm256_add_pd(number(0.54f), _mm256_mul_pd(number(0.46f), cosine)));
  } else {
    inside = _mm256_and_pd(_mm256_cmp_pd(x, number(-3.0), _CMP_GE_OQ),
                           _mm256_cmp_pd(x, number(3.0), _CMP_LT_OQ));
    const __m256d y = _mm256_mul_pd(x, pi);
    const __m256d sines =
        _mm256_mul_pd(sine_of_pi(x), sine_of_pi(_mm256_mul_pd(x, number(1.0 / 3.0))));
    value = _mm256_div_pd(_mm256_mul_pd(sines, number(3.0)), _mm256_mul_pd(y, y));
  }
  return _mm256_and_pd(_mm256_blendv_pd(value, one, zero), inside);
}

template <Filter kFilter>
STOKER_INLINE __m256d filter_value(__m256d x) {
  if (is_trigonometric(kFilter)) return trigonometric_value<kFilter>(x);
  const __m256d one = number(1.0);
  if (kFilter == Filter::box) {
    return _mm256_and_pd(one, _mm256_and_pd(_mm256_cmp_pd(x, number(-0.5), _CMP_GT_OQ),
                                            _mm256_cmp_pd(x, number(0.5), _CMP_LE_OQ)));
  }
  x = _mm256_andnot_pd(number(-0.0), x);
  const __m256d below_one = _mm256_cmp_pd(x, one, _CMP_LT_OQ);
  if (kFilter == Filter::bilinear) return _mm256_and_pd(_mm256_sub_pd(one, x), below_one);
  constexpr double a = -0.5;
  const __m256d inner = _mm256_add_pd(
      _mm256_mul_pd(
          _mm256_mul_pd(_mm256_sub_pd(_mm256_mul_pd(number(a + 2.0), x), number(a + 3.0)), x), x),
      one);
  __m256d outer = _mm256_add_pd(_mm256_mul_pd(_mm256_sub_pd(x, number(5)), x), number(8));
  outer = _mm256_mul_pd(_mm256_sub_pd(_mm256_mul_pd(outer, x), number(4)), number(a));
  outer = _mm256_and_pd(outer, _mm256_cmp_pd(x, number(2.0), _CMP_LT_OQ));
  return _mm256_blendv_pd(outer, inner, below_one);
}

// Drops weights that are zero at either end.
STOKER_INLINE void trim(Axis& axis, int slot, int low, int taps) {
  int32_t* weights = axis.weights + static_cast<size_t>(slot) * axis.pitch;
  int skipped = 0;
  while (skipped < taps - 1 && weights[skipped] == 0) ++skipped;
  while (taps > skipped + 1 && weights[taps - 1] == 0) --taps;
  taps -= skipped;
  if (skipped > 0) {  // shift, and clear what follows
    for (int t = 0; t < taps + skipped; t += 4) {
      const __m128i kept = _mm_cmpgt_epi32(
          _mm_set1_epi32(taps), _mm_add_epi32(_mm_set1_epi32(t), _mm_setr_epi32(0, 1, 2, 3)));
      store16(weights + t, _mm_and_si128(load16(weights + t + skipped), kept));
    }
  }
  axis.first[slot] = low + skipped;
  axis.taps[slot] = taps;
}

// Note [Doubtful weights]: hamming and lanczos need sines, whose last bits depend on the library.
// They are approximated here, and where a weight comes so close to the middle between two integers
// that the error could decide the rounding, build_weights() does that output. The error of a weight
// is below 1e-5; kDoubt is ten times that and sends about 1 output in 400 to it.
constexpr double kDoubt = 1e-4;

void build_one(const AxisSpec& spec, const AxisPlan& plan, const Axis& axis, int output, int slot,
               double* work) {
  AxisSpec one = spec;
  one.begin += output;
  one.count = 1;
  one.mirrored = false;
  Axis at = axis;
  at.first += slot;
  at.taps += slot;
  at.weights += static_cast<size_t>(slot) * axis.pitch;
  build_weights(one, plan, at, work);
}

template <Filter kFilter>
void build_with(const AxisSpec& spec, const AxisPlan& plan, Axis& axis, double* work) {
  const __m256d half = number(0.5), support = number(plan.support), scale = number(plan.scale);
  for (int i = 0; i < spec.count; i += 4) {
    const int outputs = smaller(4, spec.count - i);
    const __m256d output = _mm256_cvtepi32_pd(
        _mm_add_epi32(_mm_set1_epi32(spec.begin + i), _mm_setr_epi32(0, 1, 2, 3)));
    const __m256d center = _mm256_mul_pd(_mm256_add_pd(output, half), scale);
    const __m128i low =
        _mm_max_epi32(_mm256_cvttpd_epi32(_mm256_add_pd(_mm256_sub_pd(center, support), half)),
                      _mm_setzero_si128());
    const __m128i high =
        _mm_min_epi32(_mm256_cvttpd_epi32(_mm256_add_pd(_mm256_add_pd(center, support), half)),
                      _mm_set1_epi32(spec.size));
    const __m128i count = _mm_sub_epi32(high, low);
    int lows[4], counts[4];
    store16(lows, low);
    store16(counts, count);
    int most = 0;
    for (int u = 0; u < outputs; ++u) most = larger(most, counts[u]);
    most = smaller((most + 3) & ~3, axis.pitch);

    __m256d sum = _mm256_setzero_pd();
    for (int t = 0; t < most; ++t) {
      const __m128i tap = _mm_set1_epi32(t);
      const __m256d distance = _mm256_mul_pd(
          _mm256_add_pd(_mm256_sub_pd(_mm256_cvtepi32_pd(_mm_add_epi32(tap, low)), center), half),
          number(plan.inverse_stretch));
      const __m256d inside =
          _mm256_castsi256_pd(_mm256_cvtepi32_epi64(_mm_cmpgt_epi32(count, tap)));
      const __m256d value = _mm256_and_pd(filter_value<kFilter>(distance), inside);
      _mm256_storeu_pd(work + 4 * t, value);
      sum = _mm256_add_pd(sum, value);
    }
    sum = _mm256_blendv_pd(sum, number(1.0), _mm256_cmp_pd(sum, number(0.0), _CMP_EQ_OQ));

    int32_t* weights[4];
    for (int u = 0; u < 4; ++u) {
      // Outputs past the last one go to spare slots behind the table.
      const int slot = u >= outputs    ? spec.count + u
                       : spec.mirrored ? spec.count - 1 - i - u
                                       : i + u;
      weights[u] = axis.weights + static_cast<size_t>(slot) * axis.pitch;
    }
    __m256d doubtful = _mm256_setzero_pd();
    auto rounded = [&](int t) __attribute__((always_inline)) {
      const __m256d value = _mm256_mul_pd(_mm256_div_pd(_mm256_loadu_pd(work + 4 * t), sum),
                                          number(1 << kWeightBits));
      const __m256d sign =
          _mm256_and_pd(number(-0.0), _mm256_cmp_pd(value, number(0.0), _CMP_LT_OQ));
      const __m256d moved = _mm256_add_pd(value, _mm256_or_pd(half, sign));
      const __m128i whole = _mm256_cvttpd_epi32(moved);
      if (is_trigonometric(kFilter)) {
        const __m256d fraction =
            _mm256_andnot_pd(number(-0.0), _mm256_sub_pd(moved, _mm256_cvtepi32_pd(whole)));
        const __m256d to_half = _mm256_andnot_pd(number(-0.0), _mm256_sub_pd(fraction, half));
        doubtful = _mm256_or_pd(doubtful, _mm256_cmp_pd(to_half, number(0.5 - kDoubt), _CMP_GT_OQ));
      }
      return whole;
    };
    for (int t = 0; t < most; t += 4) {  // a 4 x 4 transposition
      const __m128i k0 = rounded(t), k1 = rounded(t + 1), k2 = rounded(t + 2), k3 = rounded(t + 3);
      const __m128i a0 = _mm_unpacklo_epi32(k0, k1), a1 = _mm_unpackhi_epi32(k0, k1);
      const __m128i b0 = _mm_unpacklo_epi32(k2, k3), b1 = _mm_unpackhi_epi32(k2, k3);
      store16(weights[0] + t, _mm_unpacklo_epi64(a0, b0));
      store16(weights[1] + t, _mm_unpackhi_epi64(a0, b0));
      store16(weights[2] + t, _mm_unpacklo_epi64(a1, b1));
      store16(weights[3] + t, _mm_unpackhi_epi64(a1, b1));
    }
    for (int t = most; t < axis.pitch; t += 4) {
      for (int u = 0; u < 4; ++u) store16(weights[u] + t, _mm_setzero_si128());
    }
    const int in_doubt = _mm256_movemask_pd(doubtful);
    for (int u = 0; u < outputs; ++u) {
      const int slot = spec.mirrored ? spec.count - 1 - i - u : i + u;
      if (is_trigonometric(kFilter) && (in_doubt >> u & 1) != 0) {
        build_one(spec, plan, axis, i + u, slot, work);
      } else {
        trim(axis, slot, lows[u], counts[u]);
      }
    }
  }
}

void build(const AxisSpec& spec, const AxisPlan& plan, Axis& axis, double* work) {
  switch (spec.filter) {
    case Filter::box: build_with<Filter::box>(spec, plan, axis, work); break;
    case Filter::hamming: build_with<Filter::hamming>(spec, plan, axis, work); break;
    case Filter::bicubic: build_with<Filter::bicubic>(spec, plan, axis, work); break;
    case Filter::lanczos: build_with<Filter::lanczos>(spec, plan, axis, work); break;
    default: build_with<Filter::bilinear>(spec, plan, axis, work);
  }
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
    2, build, layout, pack, horizontal, vertical_from_ring, vertical_from_source, extract};

}  // namespace stoker
