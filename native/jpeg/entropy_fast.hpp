// The fast entropy decoder of the SIMD levels: two symbols per table lookup, one bit-window refill
// per three lookups. It needs 64-bit shifts by variable amounts to be cheap (BMI2). See Note [AC
// lookup].
//
// The chain window -> lookup -> shift bounds the speed, so that everything else is arranged around
// it: `state` counts consumed bits in its low byte and the zigzag position k in the next one, and
// one addition of the table's entry advances both; one test of its top bits catches an end of
// block, position 64, errors and codes outside the table.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "jpeg/scan.hpp"

namespace stoker::jpeg {
namespace {

#define STOKER_INLINE inline __attribute__((always_inline))
#define STOKER_OUTLINE __attribute__((noinline))
#define STOKER_RARE(condition) __builtin_expect(!!(condition), 0)

// [k]: where the coefficient at zigzag position k - 1 goes. Positions past the block go to the slot
// behind it, which the next block overwrites. Index 0 and everything an end of block produces go
// there, too.
struct Targets {
  uint8_t at[257];
  constexpr Targets() : at() {
    for (int i = 0; i < 257; i++) at[i] = i >= 1 && i <= 64 ? kZigzag.natural[i - 1] : 64;
  }
};
alignas(64) constexpr Targets kTargets;

STOKER_INLINE uint64_t load_big_endian(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return __builtin_bswap64(word);
}

// Length of the code at the top of the window, 0 if there is none. As limits never decrease, those
// that the next 16 bits reach are the lengths that are too short; and a code below its limit has a
// symbol.
STOKER_OUTLINE int canonical_symbol(const CanonicalCodes& codes, uint64_t window, int& symbol) {
  const int next = int(window >> 48);
  const __m256i bits = _mm256_set1_epi16(short(next));
  const __m256i limits = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes.limit));
  const __m256i reached = _mm256_cmpeq_epi16(_mm256_max_epu16(bits, limits), bits);
  const int shorter = __builtin_popcount(unsigned(_mm256_movemask_epi8(reached))) / 2;
  if (shorter == 16) return 0;
  symbol = codes.symbols[(next >> (15 - shorter)) + codes.offset[shorter]];
  return shorter + 1;
}

// The first `size` bits of the window as a coefficient; 0 for size 0.
STOKER_INLINE int64_t extend(uint64_t window, int size) {
  const uint64_t flip = ~uint64_t(int64_t(window) >> 63);  // ones if the sign bit is clear
  const uint64_t value = ((window ^ flip) >> 1) >> (63 - size);
  return int64_t((value ^ flip) - flip);
}

class FastEntropy {
 public:
  void open(const uint8_t* stream) { base_ = stream; }

  // Sets the position; at most kScanPadding - 16 bytes behind the stream's end.
  STOKER_INLINE void seek(uint64_t bit) {
    const int within = int(bit & 7);
    next_ = base_ + (bit >> 3);
    window_ = load_big_endian(next_) << within;
    next_ += 7;
    state_ = 7 + uint64_t(within);
  }

  STOKER_INLINE uint64_t position() const { return uint64_t(next_ - base_) * 8 - (63 - state_); }

  // How many zigzag positions of the block are in use (1 to 64); 0 on an error. block[64] may be
  // overwritten.
  STOKER_INLINE int decode(const DcTable& dc, const AcTable& ac, int16_t* block, int& prediction) {
    // Not memset: GCC makes "rep stos" of it, which is slow for so few bytes.
    const __m256i zero = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) _mm256_store_si256(reinterpret_cast<__m256i*>(block) + i, zero);
    Cursor c{window_, state_, next_};
    c.refill();
    int difference;
    if (STOKER_RARE(!c.dc(dc, difference))) return 0;
    prediction = int(unsigned(prediction) + unsigned(difference));
    block[0] = int16_t(prediction);
    c.state = (c.state & 255) | 1 << 8;
    const uint64_t* const lookup = ac.lookup;
    uint64_t shift = 64 - kAcBits;
    asm("" : "+r"(shift));  // keeps it in a register, where a variable shift is the shortest
    uint64_t entry;
    uint32_t k;
    const auto step = [&]() __attribute__((always_inline)) {
      entry = lookup[c.window >> shift];
      const uint64_t last = (c.window >> (rotate(entry, 24) & 63)) + rotate(entry, 48);
      c.window <<= entry & 63;
      c.state += entry;
      k = uint32_t(c.state >> 8) & 255;
      block[kTargets.at[k - uint8_t(entry >> 16)]] = int16_t(rotate(entry, 32));
      block[kTargets.at[k]] = int16_t(last);
      return (c.state & 0xc000) != 0;
    };
    bool more = !step();  // shares the window with the DC code
    for (;;) {
      if (more) {
        do c.refill();
        while (!step() && !step() && !step());
      }
      if (__builtin_expect(k - kEndOfBlock < 64, 1)) {
        save(c);
        return int(k - kEndOfBlock);
      }
      if ((entry & 255) == 0) {
        const int end = decode_escape(c, ac.codes, block, int(k) - kEscape);
        if (end < 0) return 0;
        if (end) {
          save(c);
          return end;
        }
        more = true;
        continue;
      }
      const uint32_t second = uint8_t(entry >> 16), before = k - second;
      if (second && before >= 64) {  // the second symbol belongs to the next block
        if (before > 64) return 0;
        save(c);
        seek(end_of_first(base_, ac.codes, position() - (entry & 255)));
        return 64;
      }
      if (k != 64) return 0;
      save(c);
      return 64;
    }
  }

  // As decode, without the coefficients.
  STOKER_INLINE bool skip(const DcTable& dc, const AcTable& ac, int& prediction) {
    Cursor c{window_, state_, next_};
    c.refill();
    int difference;
    if (STOKER_RARE(!c.dc(dc, difference))) return false;
    prediction = int(unsigned(prediction) + unsigned(difference));
    c.state = (c.state & 255) | 1 << 8;
    const uint16_t* const lookup = ac.skip;
    const uint64_t shift = uint64_t(64 - ac.skip_bits);
    uint32_t entry;
    const auto step = [&]() __attribute__((always_inline)) {
      entry = lookup[c.window >> shift];
      c.window <<= entry & 63;
      c.state += entry;
      return (c.state & 0xc000) != 0;
    };
    bool more = !step();
    for (;;) {
      if (more) {
        do c.refill();
        while (!step() && !step() && !step());
      }
      const int k = int(c.state >> 8) & 255;
      save(c);
      if (__builtin_expect((uint32_t(k - kEndOfBlock) < 64 || k == 64) && (entry & 255), 1))
        return true;
      const Resumed resumed =
          skip_slowly(base_, ac.codes, position() - (entry & 255), k - int(entry >> 8));
      if (resumed.k < 0) return false;
      seek(resumed.bit);
      if (resumed.k == 0) return true;
      c = {window_, state_ | uint64_t(resumed.k) << 8, next_};
      more = true;
    }
  }

 private:
  // The reader's state in registers. The bits of the window below the valid ones are real data,
  // too, so that a refill may set them again.
  struct Cursor {
    uint64_t window;
    uint64_t state;  // low byte: 63 - valid bits of the window
    const uint8_t* next;

    // At least 56 valid bits.
    STOKER_INLINE void refill() {
      window |= load_big_endian(next) >> (~state & 63);
      next += (state >> 3) & 31;
      state &= ~uint64_t{0xf8};
    }

    // Takes 27 bits at most. False if there is no such code.
    STOKER_INLINE bool dc(const DcTable& table, int& difference) {
      const uint32_t entry = table.lookup[window >> (64 - kDcBits)];
      if (STOKER_RARE(!entry)) {
        int size = 0;
        const int length = canonical_symbol(table.codes, window, size);
        if (!length) return false;
        difference = int(extend(window << length, size));
        window <<= length + size;
        state += uint64_t(length + size);
        return true;
      }
      difference = int16_t((window >> ((0 - entry) & 63)) + (entry >> 16));
      window <<= entry & 63;
      state += entry & 255;
      return true;
    }
  };

  static STOKER_INLINE uint64_t rotate(uint64_t x, int n) { return x >> n | x << (64 - n); }

  STOKER_INLINE void save(const Cursor& c) {
    window_ = c.window;
    state_ = c.state & 255;
    next_ = c.next;
  }

  // One symbol outside the table. The end of the block if it ends, 0 if it goes on, -1 on an error;
  // k: where it stood.
  STOKER_INLINE static int decode_escape(Cursor& c, const CanonicalCodes& codes, int16_t* block,
                                         int k) {
    c.refill();
    int symbol = 0;
    const int length = canonical_symbol(codes, c.window, symbol);
    if (!length) return -1;
    c.window <<= length;
    const int size = symbol & 15, run = symbol >> 4;
    if (size == 0 && run != 15) {
      c.state += uint64_t(length);
      return k;
    }
    k += run;
    if (size) {
      if (k > 63) return -1;
      block[kZigzag.natural[k]] = int16_t(extend(c.window, size));
      c.window <<= size;
    }
    k++;
    c.state += uint64_t(length + size);
    if (k >= 64) return k == 64 ? 64 : -1;
    c.state = (c.state & 255) | uint64_t(k) << 8;
    return 0;
  }

  // The bit behind the first of the two symbols of an entry that starts at bit `at`.
  STOKER_OUTLINE static uint64_t end_of_first(const uint8_t* base, const CanonicalCodes& codes,
                                              uint64_t at) {
    const uint64_t window = load_big_endian(base + (at >> 3)) << (at & 7);
    int symbol = 0;
    const int length = canonical_symbol(codes, window, symbol);
    return at + uint64_t(length + (symbol & 15));
  }

  struct Resumed {
    uint64_t bit;
    int64_t k;  // 0: the block has ended, -1: error
  };

  // Redoes an entry that is an escape or crosses the end of the block, symbol by symbol: one at
  // least, and the rest of the block where its end is near.
  STOKER_OUTLINE static Resumed skip_slowly(const uint8_t* base, const CanonicalCodes& codes,
                                            uint64_t at, int k) {
    do {
      const uint64_t window = load_big_endian(base + (at >> 3)) << (at & 7);
      int symbol = 0;
      const int length = canonical_symbol(codes, window, symbol);
      if (!length) return {at, -1};
      const int size = symbol & 15, run = symbol >> 4;
      at += uint64_t(length + size);
      if (size == 0 && run != 15) return {at, 0};
      k += run + 1;
      if (k > 64) return {at, -1};
      if (k == 64) return {at, 0};
    } while (k > 40);
    return {at, k};
  }

  const uint8_t* base_ = nullptr;
  const uint8_t* next_ = nullptr;
  uint64_t window_ = 0;
  uint64_t state_ = 0;  // as in Cursor, without k
};

}  // namespace
}  // namespace stoker::jpeg
