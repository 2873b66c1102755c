// Small baseline JPEG files made from random coefficients, so that the fuzzer needs no files and no
// encoder library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stoker::fuzz {

using File = std::vector<uint8_t>;

// Numbers that repeat from run to run and machine to machine (SplitMix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  // 0 to bound - 1; bound > 0.
  size_t below(size_t bound) { return size_t(next() % bound); }
  int between(int low, int high) { return low + int(below(size_t(high - low + 1))); }
  bool chance(int percent) { return below(100) < size_t(percent); }

 private:
  uint64_t state_;
};

struct Shape {
  int width, height;
  int h, v;  // luma sampling factors, 1 or 2; ignored for gray
  bool gray;
  int restart_interval;  // MCUs; 0: none
  int density;           // percentage of nonzero coefficients
  bool flat_codes;       // all AC codes of 8 bits instead of the standard table
};

// One Huffman table with its codes.
struct Codes {
  uint8_t counts[16] = {};
  std::vector<uint8_t> symbols;
  uint32_t code[256] = {};
  int length[256] = {};

  void assign() {
    uint32_t next = 0;
    size_t index = 0;
    for (int bits = 1; bits <= 16; bits++, next <<= 1) {
      for (int i = 0; i < counts[bits - 1]; i++, index++) {
        code[symbols[index]] = next++;
        length[symbols[index]] = bits;
      }
    }
  }
};

// Sizes of DC differences, as in table K.3 of ITU-T T.81.
inline Codes dc_codes() {
  Codes codes;
  const uint8_t counts[16] = {0, 1, 5, 1, 1, 1, 1, 1, 1};
  for (int i = 0; i < 16; i++) codes.counts[i] = counts[i];
  for (int i = 0; i < 12; i++) codes.symbols.push_back(uint8_t(i));
  codes.assign();
  return codes;
}

// Runs and sizes of AC coefficients: table K.5 of ITU-T T.81, or the same symbols with 8 bits each.
inline Codes ac_codes(bool flat) {
  Codes codes;
  const uint8_t counts[16] = {0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 125};
  for (int i = 0; i < 16; i++) codes.counts[i] = flat ? 0 : counts[i];
  codes.symbols = {0x01, 0x02, 0x03, 0x00, 0x04, 0x11, 0x05, 0x12, 0x21, 0x31, 0x41, 0x06, 0x13,
                   0x51, 0x61, 0x07, 0x22, 0x71, 0x14, 0x32, 0x81, 0x91, 0xa1, 0x08, 0x23, 0x42,
                   0xb1, 0xc1, 0x15, 0x52, 0xd1, 0xf0, 0x24, 0x33, 0x62, 0x72, 0x82};
  // The long codes: what is left, in order.
  bool listed[256] = {};
  for (uint8_t symbol : codes.symbols) listed[symbol] = true;
  for (int run = 0; run < 16; run++)
    for (int size = 1; size <= 10; size++)
      if (!listed[run << 4 | size]) codes.symbols.push_back(uint8_t(run << 4 | size));
  if (flat) codes.counts[7] = uint8_t(codes.symbols.size());
  codes.assign();
  return codes;
}

// Writes entropy-coded bits, stuffing a zero after each FF.
class BitWriter {
 public:
  explicit BitWriter(File& file) : file_(file) {}
  void put(uint32_t bits, int count) {
    for (int i = count - 1; i >= 0; i--) {
      byte_ = byte_ << 1 | (bits >> i & 1);
      if (++filled_ == 8) flush_byte();
    }
  }
  // Pads with ones up to a byte.
  void finish() {
    while (filled_) put(1, 1);
  }
  // A symbol with the bits of a number that has `size` of them.
  void put_number(const Codes& codes, int symbol, int value, int size) {
    put(codes.code[symbol], codes.length[symbol]);
    put(uint32_t(value < 0 ? value + (1 << size) - 1 : value), size);
  }

 private:
  void flush_byte() {
    file_.push_back(uint8_t(byte_));
    if ((byte_ & 255) == 255) file_.push_back(0);
    byte_ = 0;
    filled_ = 0;
  }
  File& file_;
  uint32_t byte_ = 0;
  int filled_ = 0;
};

inline int bits_of(int value) {
  int size = 0;
  for (int magnitude = value < 0 ? -value : value; magnitude; magnitude >>= 1) size++;
  return size;
}

inline void put_block(BitWriter& bits, Random& random, const Codes& dc, const Codes& ac,
                      int density, int& prediction) {
  const int value = random.between(-60, 60), difference = value - prediction;
  prediction = value;
  bits.put_number(dc, bits_of(difference), difference, bits_of(difference));
  const int end = random.chance(30)   ? 1
                  : random.chance(30) ? random.between(1, 10)
                                      : random.between(1, 64);
  int run = 0;
  for (int k = 1; k < end; k++) {
    if (!random.chance(density)) {
      run++;
      continue;
    }
    for (; run > 15; run -= 16) bits.put_number(ac, 0xf0, 0, 0);
    const int limit = random.chance(3) ? 1023 : random.chance(20) ? 30 : 3;
    int coefficient = random.between(1, limit);
    if (random.chance(50)) coefficient = -coefficient;
    bits.put_number(ac, run << 4 | bits_of(coefficient), coefficient, bits_of(coefficient));
    run = 0;
    if (k == 63) return;
  }
  bits.put_number(ac, 0x00, 0, 0);
}

inline void put_segment(File& file, int marker, const File& payload) {
  const size_t length = payload.size() + 2;
  file.insert(file.end(), {0xFF, uint8_t(marker), uint8_t(length >> 8), uint8_t(length)});
  file.insert(file.end(), payload.begin(), payload.end());
}

inline void put_huffman(File& file, int destination, const Codes& codes) {
  File payload{uint8_t(destination)};
  payload.insert(payload.end(), codes.counts, codes.counts + 16);
  payload.insert(payload.end(), codes.symbols.begin(), codes.symbols.end());
  put_segment(file, 0xC4, payload);
}

inline File make_seed(Random& random, const Shape& shape) {
  const Codes dc = dc_codes(), ac = ac_codes(shape.flat_codes);
  const int components = shape.gray ? 1 : 3, h = shape.gray ? 1 : shape.h,
            v = shape.gray ? 1 : shape.v;
  File file{0xFF, 0xD8};
  put_segment(file, 0xE0, {'J', 'F', 'I', 'F', 0, 1, 1, 0, 0, 1, 0, 1, 0, 0});
  for (int table = 0; table < 2; table++) {
    File payload{uint8_t(table)};
    const int step = random.between(0, 2);
    for (int k = 0; k < 64; k++) payload.push_back(uint8_t(2 + step * k / 8));
    put_segment(file, 0xDB, payload);
  }
  File frame{8,
             uint8_t(shape.height >> 8),
             uint8_t(shape.height),
             uint8_t(shape.width >> 8),
             uint8_t(shape.width),
             uint8_t(components)};
  File scan{uint8_t(components)};
  for (int i = 0; i < components; i++) {
    frame.insert(frame.end(), {uint8_t(i + 1), uint8_t(i ? 0x11 : h << 4 | v), uint8_t(i ? 1 : 0)});
    scan.insert(scan.end(), {uint8_t(i + 1), uint8_t(i ? 0x11 : 0x00)});
  }
  scan.insert(scan.end(), {0, 63, 0});
  put_segment(file, 0xC0, frame);
  for (int table = 0; table < 2; table++) {
    put_huffman(file, table, dc);
    put_huffman(file, 0x10 | table, ac);
  }
  if (shape.restart_interval)
    put_segment(file, 0xDD,
                {uint8_t(shape.restart_interval >> 8), uint8_t(shape.restart_interval)});
  put_segment(file, 0xDA, scan);

  const int mcus = (shape.width + 8 * h - 1) / (8 * h) * ((shape.height + 8 * v - 1) / (8 * v));
  int prediction[3] = {0, 0, 0}, restarts = 0;
  BitWriter bits(file);
  for (int mcu = 0; mcu < mcus; mcu++) {
    if (mcu && shape.restart_interval && mcu % shape.restart_interval == 0) {
      bits.finish();
      file.insert(file.end(), {0xFF, uint8_t(0xD0 + (restarts++ & 7))});
      prediction[0] = prediction[1] = prediction[2] = 0;
    }
    for (int i = 0; i < components; i++)
      for (int block = 0; block < (i ? 1 : h * v); block++)
        put_block(bits, random, dc, ac, shape.density, prediction[i]);
  }
  bits.finish();
  file.insert(file.end(), {0xFF, 0xD9});
  return file;
}

// One file of every kind, of different sizes.
inline std::vector<File> make_seeds(uint64_t seed) {
  Random random(seed);
  std::vector<File> files;
  for (int sampling = 0; sampling < 5; sampling++) {
    for (int restart = 0; restart < 2; restart++) {
      for (int size = 0; size < 3; size++) {
        const int most = size == 0 ? 17 : size == 1 ? 50 : 130;
        files.push_back(make_seed(random, {.width = random.between(1, most),
                                           .height = random.between(1, most),
                                           .h = 1 + (sampling & 1),
                                           .v = 1 + (sampling >> 1 & 1),
                                           .gray = sampling == 4,
                                           .restart_interval = restart ? random.between(1, 9) : 0,
                                           .density = random.between(5, 90),
                                           .flat_codes = random.chance(30)}));
      }
    }
  }
  return files;
}

}  // namespace stoker::fuzz
