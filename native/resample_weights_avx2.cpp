// build_weights() for four outputs at a time with AVX2. The operations and their order are those of
// resample_tables.cpp, without fused ones, but for the sines of hamming and lanczos.
#include <immintrin.h>

#include "resample_kernels.hpp"

namespace stoker {
namespace {

#define STOKER_INLINE inline __attribute__((always_inline))

STOKER_INLINE int smaller(int a, int b) { return a < b ? a : b; }
STOKER_INLINE int larger(int a, int b) { return a > b ? a : b; }

STOKER_INLINE __m128i load16(const void* from) {
  return _mm_loadu_si128(static_cast<const __m128i*>(from));
}
STOKER_INLINE void store16(void* to, __m128i value) {
  _mm_storeu_si128(static_cast<__m128i*>(to), value);
}

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

}  // namespace

void build_weights_avx2(const AxisSpec& spec, const AxisPlan& plan, Axis& axis, double* work) {
  switch (spec.filter) {
    case Filter::box: build_with<Filter::box>(spec, plan, axis, work); break;
    case Filter::hamming: build_with<Filter::hamming>(spec, plan, axis, work); break;
    case Filter::bicubic: build_with<Filter::bicubic>(spec, plan, axis, work); break;
    case Filter::lanczos: build_with<Filter::lanczos>(spec, plan, axis, work); break;
    default: build_with<Filter::bilinear>(spec, plan, axis, work);
  }
}

}  // namespace stoker
