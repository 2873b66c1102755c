// The transform and the colour conversion, written once for every vector width. `L` names the
// operations on vectors that consist of kBlocks lanes of 128 bits, one block or 16 pixels each; all
// but L's loads and stores stay within lanes.
#pragma once

#include "jpeg/scan.hpp"

namespace stoker::jpeg {
namespace {

#define STOKER_KERNEL __attribute__((always_inline)) static inline

// Two 16-bit factors for multiply-add.
template <class L>
STOKER_KERNEL typename L::V multiply(typename L::V pairs, int even, int odd) {
  return L::madd(pairs, L::set32(int(uint32_t(uint16_t(even)) | uint32_t(uint16_t(odd)) << 16)));
}

template <class L, int kHigh>
STOKER_KERNEL typename L::V interleave16(typename L::V a, typename L::V b) {
  if constexpr (kHigh)
    return L::unpackhi16(a, b);
  else
    return L::unpacklo16(a, b);
}

// Note [Transform]
// libjpeg's accurate integer transform ("islow", after Loeffler, Ligtenberg and Moschytz, 13-bit
// constants): columns first, rounded to 2 extra bits, then rows, rounded to samples. Each product
// pair is one multiply-add in 32 bits; sums of two inputs wrap in 16 bits and results of a pass
// saturate to 16 bits, as in libjpeg-turbo's SIMD code.
template <class L>
struct Halves {
  typename L::V even[4], odd[4];
};

// Half of the columns of one pass, in 32 bits. kSparse: rows 4 to 7 are zero.
template <class L, int kShift, bool kSparse, int kHigh>
STOKER_KERNEL Halves<L> butterfly(const typename L::V* v) {
  using V = typename L::V;
  const V zero = L::zero(), round = L::set32(1 << (kShift - 1));
  V t0, t1, t2, t3;
  if constexpr (kSparse) {
    t0 = t1 = L::add32(multiply<L>(interleave16<L, kHigh>(v[0], zero), 8192, 0), round);
    const V b = interleave16<L, kHigh>(v[2], zero);
    t3 = multiply<L>(b, 10703, 0);
    t2 = multiply<L>(b, 4433, 0);
  } else {
    const V sum = L::add16(v[0], v[4]), difference = L::sub16(v[0], v[4]);
    t0 = L::add32(multiply<L>(interleave16<L, kHigh>(sum, zero), 8192, 0), round);
    t1 = L::add32(multiply<L>(interleave16<L, kHigh>(difference, zero), 8192, 0), round);
    const V b = interleave16<L, kHigh>(v[2], v[6]);
    t3 = multiply<L>(b, 10703, 4433);
    t2 = multiply<L>(b, 4433, -10704);
  }
  Halves<L> out;
  out.even[0] = L::add32(t0, t3);
  out.even[3] = L::sub32(t0, t3);
  out.even[1] = L::add32(t1, t2);
  out.even[2] = L::sub32(t1, t2);
  const V z = kSparse ? interleave16<L, kHigh>(v[3], v[1])
                      : interleave16<L, kHigh>(L::add16(v[7], v[3]), L::add16(v[5], v[1]));
  const V z3 = multiply<L>(z, -6436, 9633), z4 = multiply<L>(z, 9633, 6437);
  const V a = interleave16<L, kHigh>(kSparse ? zero : v[7], v[1]);
  const V b = interleave16<L, kHigh>(kSparse ? zero : v[5], v[3]);
  out.odd[0] = L::add32(multiply<L>(a, -7373, 4926), z4);
  out.odd[1] = L::add32(multiply<L>(b, -20995, 4177), z3);
  out.odd[2] = L::add32(multiply<L>(b, -4176, -20995), z4);
  out.odd[3] = L::add32(multiply<L>(a, -4927, -7373), z3);
  return out;
}

template <class L, int kShift, bool kSparse>
STOKER_KERNEL void pass(typename L::V* v) {
  const Halves<L> low = butterfly<L, kShift, kSparse, 0>(v),
                  high = butterfly<L, kShift, kSparse, 1>(v);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    v[i] = L::packs32(L::template srai32<kShift>(L::add32(low.even[i], low.odd[i])),
                      L::template srai32<kShift>(L::add32(high.even[i], high.odd[i])));
    v[7 - i] = L::packs32(L::template srai32<kShift>(L::sub32(low.even[i], low.odd[i])),
                          L::template srai32<kShift>(L::sub32(high.even[i], high.odd[i])));
  }
}

// Transposes each block. kSparse: only columns 0 to 3 are wanted, as the others are zero.
template <class L, bool kSparse>
STOKER_KERNEL void transpose(typename L::V* v) {
  using V = typename L::V;
  const V a0 = L::unpacklo16(v[0], v[1]), a1 = L::unpackhi16(v[0], v[1]);
  const V a2 = L::unpacklo16(v[2], v[3]), a3 = L::unpackhi16(v[2], v[3]);
  const V a4 = L::unpacklo16(v[4], v[5]), a5 = L::unpackhi16(v[4], v[5]);
  const V a6 = L::unpacklo16(v[6], v[7]), a7 = L::unpackhi16(v[6], v[7]);
  const V b0 = L::unpacklo32(a0, a2), b1 = L::unpackhi32(a0, a2);
  const V b4 = L::unpacklo32(a4, a6), b5 = L::unpackhi32(a4, a6);
  v[0] = L::unpacklo64(b0, b4);
  v[1] = L::unpackhi64(b0, b4);
  v[2] = L::unpacklo64(b1, b5);
  v[3] = L::unpackhi64(b1, b5);
  if constexpr (!kSparse) {
    const V b2 = L::unpacklo32(a1, a3), b3 = L::unpackhi32(a1, a3);
    const V b6 = L::unpacklo32(a5, a7), b7 = L::unpackhi32(a5, a7);
    v[4] = L::unpacklo64(b2, b6);
    v[5] = L::unpackhi64(b2, b6);
    v[6] = L::unpacklo64(b3, b7);
    v[7] = L::unpackhi64(b3, b7);
  }
}

// Blocks into samples side by side. kSparse: coefficients outside the upper left 4 x 4 are zero.
// excess: gets bits where a coefficient is above its limit.
template <class L, bool kSparse>
STOKER_KERNEL void transform_blocks(const int16_t* const* blocks, const Quant& quant, uint8_t* out,
                                    size_t stride, typename L::V& excess) {
  using V = typename L::V;
  V v[8];
#pragma GCC unroll 8
  for (int i = 0; i < (kSparse ? 4 : 8); i++) {
    const V coefficients = L::load_row(blocks, 8 * i);
    excess =
        L::bit_or(excess, L::subs_u16(L::abs16(coefficients), L::broadcast(quant.limit + 8 * i)));
    v[i] = L::mullo16(coefficients, L::broadcast(quant.factor + 8 * i));
  }
  pass<L, 11, kSparse>(v);
  transpose<L, kSparse>(v);
  pass<L, 18, kSparse>(v);
  // To bytes, and transposed back.
  const V p = L::packs16(v[0], v[4]), q = L::packs16(v[1], v[5]);
  const V r = L::packs16(v[2], v[6]), s = L::packs16(v[3], v[7]);
  const V pr0 = L::unpacklo8(p, r), pr1 = L::unpackhi8(p, r);
  const V qs0 = L::unpacklo8(q, s), qs1 = L::unpackhi8(q, s);
  const V e0 = L::unpacklo8(pr0, qs0), e1 = L::unpackhi8(pr0, qs0);
  const V f0 = L::unpacklo8(pr1, qs1), f1 = L::unpackhi8(pr1, qs1);
  const V center = L::set32(int(0x80808080u));
  L::store_two_rows(L::bit_xor(L::unpacklo32(e0, f0), center), out, stride);
  L::store_two_rows(L::bit_xor(L::unpackhi32(e0, f0), center), out + 2 * stride, stride);
  L::store_two_rows(L::bit_xor(L::unpacklo32(e1, f1), center), out + 4 * stride, stride);
  L::store_two_rows(L::bit_xor(L::unpackhi32(e1, f1), center), out + 6 * stride, stride);
}

// Eight equal samples of a block that has a DC coefficient only.
STOKER_KERNEL uint64_t flat_row(int dc, const Quant& quant) {
  int value = (int16_t(int16_t(dc * quant.factor[0]) * 4) + 16) >> 5;
  value = value < -128 ? -128 : value > 127 ? 127 : value;
  return 0x0101010101010101u * uint64_t(value + 128);
}

// Note [Colour]
// With Cb and Cr taken minus 128, libjpeg's 16-bit fixed-point constants give
//   R = Y + ((91881 Cr + 32768) >> 16)        B = Y + ((116130 Cb + 32768) >> 16)
//   G = Y + ((-22554 Cb - 46802 Cr + 32768) >> 16)
// clamped. The multiples of 65536 are split off, which leaves products of 16-bit numbers; equal for
// all inputs.
template <class L, int kHigh>
STOKER_KERNEL void half_color(typename L::V y8, typename L::V cb8, typename L::V cr8,
                              typename L::V* rgb) {
  using V = typename L::V;
  const V zero = L::zero(), center = L::set16(128);
  const auto widen = [&](V x) __attribute__((always_inline)) {
    if constexpr (kHigh)
      return L::unpackhi8(x, zero);
    else
      return L::unpacklo8(x, zero);
  };
  const V y = widen(y8), cb = L::sub16(widen(cb8), center), cr = L::sub16(widen(cr8), center);
  const V t = L::mulhi16(L::add16(cr, cr), L::set16(26345));
  rgb[0] = L::add16(y, L::add16(cr, L::template srai16<1>(L::add16(t, L::set16(1)))));
  rgb[2] = L::add16(y, L::add16(L::add16(cb, cb), L::mulhrs16(cb, L::set16(-7471))));
  const V round = L::set32(32768);
  const V g0 =
      L::template srai32<16>(L::add32(multiply<L>(L::unpacklo16(cb, cr), -22554, 18734), round));
  const V g1 =
      L::template srai32<16>(L::add32(multiply<L>(L::unpackhi16(cb, cr), -22554, 18734), round));
  rgb[1] = L::add16(y, L::sub16(L::packs32(g0, g1), cr));
}

template <class L>
STOKER_KERNEL void color_line(const uint8_t* y, const uint8_t* cb, const uint8_t* cr, uint8_t* out,
                              int width) {
  using V = typename L::V;
  constexpr int kPixels = int(sizeof(V));
  for (int x = 0; x < width; x += kPixels) {
    const V y8 = L::load(y + x), cb8 = L::load(cb + x), cr8 = L::load(cr + x);
    V low[3], high[3];
    half_color<L, 0>(y8, cb8, cr8, low);
    half_color<L, 1>(y8, cb8, cr8, high);
    L::store_rgb(L::packus16(low[0], high[0]), L::packus16(low[1], high[1]),
                 L::packus16(low[2], high[2]), out + 3 * x, 3 * (width - x));
  }
}

template <class L>
STOKER_KERNEL void gray_line(const uint8_t* y, uint8_t* out, int width) {
  using V = typename L::V;
  constexpr int kPixels = int(sizeof(V));
  for (int x = 0; x < width; x += kPixels) {
    const V y8 = L::load(y + x);
    L::store_rgb(y8, y8, y8, out + 3 * x, 3 * (width - x));
  }
}

}  // namespace
}  // namespace stoker::jpeg
