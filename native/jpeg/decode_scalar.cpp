// The reference that the SIMD levels are tested against, written to be read: one symbol, one block,
// one sample at a time.
#include "jpeg/decode_loop.hpp"

namespace stoker::jpeg {
namespace {

class PlainEntropy {
 public:
  void open(const uint8_t* stream) { stream_ = stream; }
  void seek(uint64_t bit) { position_ = bit; }
  uint64_t position() const { return position_; }

  int decode(const DcTable& dc, const AcTable& ac, int16_t* block, int& prediction) {
    std::memset(block, 0, 128);
    const int used = walk(dc, ac, block, prediction);
    if (used) block[0] = int16_t(prediction);
    return used;
  }

  bool skip(const DcTable& dc, const AcTable& ac, int& prediction) {
    return walk(dc, ac, nullptr, prediction) != 0;
  }

 private:
  int walk(const DcTable& dc, const AcTable& ac, int16_t* block, int& prediction) {
    int size;
    if (!symbol(dc.codes, size)) return 0;
    prediction = int(unsigned(prediction) + unsigned(coefficient(size)));
    for (int k = 1; k < 64;) {
      int code;
      if (!symbol(ac.codes, code)) return 0;
      const int run = code >> 4;
      size = code & 15;
      if (size == 0 && run != 15) return k;  // the rest is zero
      k += run;
      const int value = coefficient(size);
      if (k > 63) return 0;
      if (block && size) block[kZigzag.natural[k]] = int16_t(value);
      k++;
    }
    return 64;
  }

  int bit() {
    const int value = stream_[position_ >> 3] >> (7 - (position_ & 7)) & 1;
    position_++;
    return value;
  }

  bool symbol(const CanonicalCodes& codes, int& value) {
    int code = 0;
    for (int length = 1; length <= 16; length++) {
      code = code << 1 | bit();
      if (code << (16 - length) >= codes.limit[length - 1]) continue;
      value = codes.symbols[code + codes.offset[length - 1]];
      return true;
    }
    return false;
  }

  int coefficient(int size) {
    int value = 0;
    for (int i = 0; i < size; i++) value = value << 1 | bit();
    return size && value < 1 << (size - 1) ? value - (1 << size) + 1 : value;
  }

  const uint8_t* stream_ = nullptr;
  uint64_t position_ = 0;
};

int clamp_to(int value, int low, int high) {
  return value < low ? low : value > high ? high : value;
}

// One pass over eight numbers `step` apart. See Note [Transform]: sums of inputs wrap in 16 bits,
// results saturate.
void transform_line(int16_t* v, int step, int shift) {
  const auto at = [&](int i) { return int(v[i * step]); };
  const auto sum = [&](int i, int j) { return int(int16_t(at(i) + at(j))); };
  const int t0 = sum(0, 4) * 8192, t1 = int16_t(at(0) - at(4)) * 8192;
  const int t2 = at(2) * 4433 - at(6) * 10704, t3 = at(2) * 10703 + at(6) * 4433;
  const int even[4] = {t0 + t3, t1 + t2, t1 - t2, t0 - t3};
  const int z3 = sum(7, 3) * -6436 + sum(5, 1) * 9633, z4 = sum(7, 3) * 9633 + sum(5, 1) * 6437;
  const int odd[4] = {at(7) * -7373 + at(1) * 4926 + z4, at(5) * -20995 + at(3) * 4177 + z3,
                      at(5) * -4176 - at(3) * 20995 + z4, at(7) * -4927 - at(1) * 7373 + z3};
  const int round = 1 << (shift - 1);
  for (int i = 0; i < 4; i++) {
    v[i * step] = int16_t(clamp_to((even[i] + odd[i] + round) >> shift, -32768, 32767));
    v[(7 - i) * step] = int16_t(clamp_to((even[i] - odd[i] + round) >> shift, -32768, 32767));
  }
}

struct Kernels {
  using Entropy = PlainEntropy;
  static constexpr int kBlocks = 1;
  using Excess = bool;
  static bool any(Excess excess) { return excess; }

  static void transform(const int16_t* const* blocks, int, const Quant& quant, uint8_t* out,
                        size_t stride, Excess& excess) {
    int16_t v[64];
    for (int i = 0; i < 64; i++) {
      const int coefficient = blocks[0][i];
      excess |= (coefficient < 0 ? -coefficient : coefficient) > quant.limit[i];
      v[i] = int16_t(coefficient * quant.factor[i]);
    }
    for (int i = 0; i < 8; i++) transform_line(v + i, 8, 11);
    for (int i = 0; i < 8; i++) transform_line(v + 8 * i, 1, 18);
    for (int i = 0; i < 64; i++)
      out[size_t(i >> 3) * stride + size_t(i & 7)] = uint8_t(clamp_to(v[i], -128, 127) + 128);
  }

  static void upsample_h(const uint8_t* in, uint8_t* out, int count) {
    for (int i = 0; i < count; i++) {
      out[2 * i] = uint8_t((3 * in[i] + in[i - 1] + 1) >> 2);
      out[2 * i + 1] = uint8_t((3 * in[i] + in[i + 1] + 2) >> 2);
    }
  }

  static void upsample_v(const uint8_t* near, const uint8_t* far, uint8_t* out, int count,
                         int bias) {
    for (int i = 0; i < count; i++) out[i] = uint8_t((3 * near[i] + far[i] + bias) >> 2);
  }

  static void upsample_hv(const uint8_t* near, const uint8_t* far, uint8_t* out, int count) {
    const auto column = [&](int i) { return 3 * near[i] + far[i]; };
    for (int i = 0; i < count; i++) {
      out[2 * i] = uint8_t((3 * column(i) + column(i - 1) + 8) >> 4);
      out[2 * i + 1] = uint8_t((3 * column(i) + column(i + 1) + 7) >> 4);
    }
  }

  static void color(const uint8_t* y, const uint8_t* cb, const uint8_t* cr, uint8_t* out,
                    int width) {
    for (int x = 0; x < width; x++, out += 3) {
      const int blue = cb[x] - 128, red = cr[x] - 128;
      out[0] = uint8_t(clamp_to(y[x] + ((91881 * red + 32768) >> 16), 0, 255));
      out[1] = uint8_t(clamp_to(y[x] + ((-22554 * blue - 46802 * red + 32768) >> 16), 0, 255));
      out[2] = uint8_t(clamp_to(y[x] + ((116130 * blue + 32768) >> 16), 0, 255));
    }
  }

  static void gray(const uint8_t* y, uint8_t* out, int width) {
    for (int x = 0; x < width; x++, out += 3) out[0] = out[1] = out[2] = y[x];
  }

  static void copy_until_ff(const uint8_t*& in, const uint8_t* end, uint8_t*& out) {
    while (in < end && *in != 0xFF) *out++ = *in++;
  }
};

}  // namespace

Status decode_scan_scalar(const Scan& scan) { return decode_scan<Kernels>(scan); }

}  // namespace stoker::jpeg
