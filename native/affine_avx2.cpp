// One pixel at a time, its channels in four lanes of doubles: the operations of affine.cpp in the
// same order.
#include <immintrin.h>

#include <cstring>

#include "affine_kernels.hpp"

namespace stoker {
namespace {

#define STOKER_INLINE inline __attribute__((always_inline))

STOKER_INLINE int clamped(int value, int last) {
  return value < 0 ? 0 : value > last ? last : value;
}

STOKER_INLINE __m256d load(const uint8_t* pixel) {
  int four;
  std::memcpy(&four, pixel, 4);
  return _mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(four)));
}

STOKER_INLINE __m256d between(__m256d a, __m256d b, __m256d share) {
  return _mm256_add_pd(a, _mm256_mul_pd(_mm256_sub_pd(b, a), share));
}

STOKER_INLINE __m256d cubic(const __m256d* v, __m256d share) {
  const __m256d two = _mm256_set1_pd(2.0);
  const __m256d p2 = _mm256_sub_pd(v[2], v[0]);
  const __m256d p3 =
      _mm256_sub_pd(_mm256_add_pd(_mm256_mul_pd(two, _mm256_sub_pd(v[0], v[1])), v[2]), v[3]);
  const __m256d p4 = _mm256_add_pd(_mm256_sub_pd(_mm256_sub_pd(v[1], v[0]), v[2]), v[3]);
  const __m256d inner = _mm256_add_pd(p3, _mm256_mul_pd(share, p4));
  const __m256d outer = _mm256_add_pd(p2, _mm256_mul_pd(share, inner));
  return _mm256_add_pd(v[1], _mm256_mul_pd(share, outer));
}

template <int kTaps>
void interpolate(const AffineSource& source, const double* m, int column, int row, int count,
                 uint8_t* out) {
  const double width = source.width, height = source.height;
  const double y_centre = row + 0.5;
  for (int i = 0; i < count; ++i, out += 3) {
    const double x_centre = column + i + 0.5;
    double x = m[0] * x_centre + m[1] * y_centre + m[2];
    double y = m[3] * x_centre + m[4] * y_centre + m[5];
    if (!(x >= 0.0 && x < width && y >= 0.0 && y < height)) {
      std::memcpy(out, source.fill, 4);
      continue;
    }
    x -= 0.5;
    y -= 0.5;
    // Positions are at least -0.5: adding 1 makes the conversion a floor.
    const int left = static_cast<int>(x + 1.0) - 1, top = static_cast<int>(y + 1.0) - 1;
    const __m256d share_x = _mm256_set1_pd(x - left), share_y = _mm256_set1_pd(y - top);
    const int first_x = left - (kTaps / 2 - 1), first_y = top - (kTaps / 2 - 1);
    ptrdiff_t columns[kTaps];
    for (int k = 0; k < kTaps; ++k)
      columns[k] = static_cast<ptrdiff_t>(clamped(first_x + k, source.width - 1)) * 3;
    __m256d lines[kTaps];
    for (int k = 0; k < kTaps; ++k) {
      const uint8_t* from = source.row(clamped(first_y + k, source.height - 1));
      __m256d taps[kTaps];
      for (int j = 0; j < kTaps; ++j) taps[j] = load(from + columns[j]);
      lines[k] = kTaps == 2 ? between(taps[0], taps[1], share_x) : cubic(taps, share_x);
    }
    const __m256d value = kTaps == 2 ? between(lines[0], lines[1], share_y) : cubic(lines, share_y);
    const __m128i whole = _mm256_cvttpd_epi32(value);
    const __m128i words = _mm_packus_epi32(whole, whole);
    const int bytes = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
    std::memcpy(out, &bytes, 4);
  }
}

}  // namespace

const Interpolate kBilinearAvx2 = interpolate<2>;
const Interpolate kBicubicAvx2 = interpolate<4>;

}  // namespace stoker
