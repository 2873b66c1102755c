#include "jpeg/huffman.hpp"

#include <algorithm>
#include <cstring>

namespace stoker::jpeg {
namespace {

// False where libjpeg fails: too many codes of a length, or a code of ones only.
bool assign_codes(CanonicalCodes& codes, const HuffmanSpec& spec) {
  std::memcpy(codes.symbols, spec.symbols, sizeof codes.symbols);
  int code = 0, index = 0;
  for (int length = 1; length <= 16; length++) {
    const int count = spec.counts[length - 1];
    codes.offset[length - 1] = index - code;
    code += count;
    index += count;
    if (count && code >= 1 << length) return false;
    codes.limit[length - 1] = uint16_t(code << (16 - length));
    code <<= 1;
  }
  return true;
}

// Value of `size` coefficient bits of which only the first (the sign) is known, the others taken as
// zero.
int lowest_value(int sign, int size) { return sign ? 1 << (size - 1) : 1 - (1 << size); }

void build_dc(DcTable& table, const HuffmanSpec& spec) {
  std::fill_n(table.lookup, 1 << kDcBits, 0u);
  uint32_t code = 0;
  int index = 0;
  for (int length = 1; length <= kDcBits; length++, code <<= 1) {
    for (int i = 0; i < spec.counts[length - 1]; i++, index++, code++) {
      const int size = spec.symbols[index];
      if (size == 0) {
        std::fill_n(table.lookup + (code << (kDcBits - length)), 1 << (kDcBits - length),
                    uint32_t(length) | uint32_t(uint16_t(-code)) << 16);
        continue;
      }
      if (length + 1 > kDcBits) continue;  // the sign lies outside the window
      for (uint32_t sign = 0; sign < 2; sign++) {
        const uint32_t known = code * 2 + sign;
        const uint32_t bias = uint32_t(lowest_value(int(sign), size)) - (known << (size - 1));
        std::fill_n(table.lookup + (known << (kDcBits - length - 1)), 1 << (kDcBits - length - 1),
                    uint32_t(length + size) | uint32_t(uint16_t(bias)) << 16);
      }
    }
  }
}

// One AC symbol whose code (and, where `with_sign`, the first coefficient bit) lies in the window.
struct Symbol {
  uint8_t length;   // code and coefficient bits; 0: none
  uint8_t advance;  // of k; kEndOfBlock at the end of a block
  uint8_t code_length;
  uint8_t size;  // coefficient bits
};

void list_symbols(const CanonicalCodes& codes, int bits, bool with_sign, Symbol* symbols) {
  std::fill_n(symbols, size_t{1} << bits, Symbol{0, 0, 0, 0});
  int code = 0, index = 0;
  for (int length = 1; length <= bits; length++, code <<= 1) {
    const int end = codes.limit[length - 1] >> (16 - length);
    for (; code < end; index++, code++) {
      const int size = codes.symbols[index] & 15, run = codes.symbols[index] >> 4;
      if (length + size > kMaxAcLength || (with_sign && length + (size > 0) > bits)) continue;
      const int advance = size == 0 && run != 15 ? kEndOfBlock : run + 1;
      std::fill_n(symbols + (size_t(code) << (bits - length)), size_t{1} << (bits - length),
                  Symbol{uint8_t(length + size), uint8_t(advance), uint8_t(length), uint8_t(size)});
    }
  }
}

// Note [AC lookup]: the constant that turns right-aligned bits into the coefficient whose code ends
// at bit `code_end` of the index.
uint16_t coefficient_bias(int index, int code_end, int size) {
  if (size == 0) return uint16_t(-(index >> (kAcBits - code_end)));
  const int known = index >> (kAcBits - code_end - 1);
  return uint16_t(uint32_t(lowest_value(known & 1, size)) - (uint32_t(known) << (size - 1)));
}

uint64_t hash_of(const HuffmanSpec& spec) {
  uint64_t hash = 0xcbf29ce484222325u ^ uint64_t(spec.size);
  const auto mix = [&hash](const uint8_t* bytes, int count) {
    for (int i = 0; i < count; i += 8) {
      uint64_t word;
      std::memcpy(&word, bytes + i, 8);
      hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
    }
  };
  mix(spec.counts, 16);
  mix(spec.symbols, (spec.size + 7) & ~7);
  return hash;
}

bool same(const HuffmanSpec& a, const HuffmanSpec& b) {
  return a.size == b.size && !std::memcmp(a.counts, b.counts, 16) &&
         !std::memcmp(a.symbols, b.symbols, size_t(a.size));
}

}  // namespace

void build_lookup(AcTable& table) {
  if (table.has_lookup) return;
  constexpr int kSize = 1 << kAcBits;
  Symbol symbols[kSize];
  list_symbols(table.codes, kAcBits, true, symbols);
  for (int i = 0; i < kSize; i++) {
    const Symbol first = symbols[i];
    if (!first.length) {
      table.lookup[i] = uint64_t{kEscape} << 8;
      continue;
    }
    if (first.advance < kEndOfBlock && first.length < kAcBits) {
      const Symbol second = symbols[(i << first.length) & (kSize - 1)];
      const int code_end = first.length + second.code_length;
      const int length = first.length + second.length;
      if (second.length && code_end + (second.size > 0) <= kAcBits && length <= kMaxAcLength) {
        int value = 0;
        if (first.size) {
          value = (i >> (kAcBits - first.length)) & ((1 << first.size) - 1);
          if (value < 1 << (first.size - 1)) value -= (1 << first.size) - 1;
        }
        table.lookup[i] = uint64_t(length) | uint64_t(first.advance + second.advance) << 8 |
                          uint64_t(second.advance) << 16 | uint64_t(64 - length) << 24 |
                          uint64_t(uint16_t(value)) << 32 |
                          uint64_t(coefficient_bias(i, code_end, second.size)) << 48;
        continue;
      }
    }
    table.lookup[i] = uint64_t(first.length) | uint64_t(first.advance) << 8 |
                      uint64_t(64 - first.length) << 24 |
                      uint64_t(coefficient_bias(i, first.code_length, first.size)) << 48;
  }
  table.has_lookup = true;
}

void build_skip(AcTable& table, int bits) {
  if (table.skip_bits >= bits) return;
  const int size = 1 << bits;
  Symbol symbols[1 << kSkipBitsLarge];
  list_symbols(table.codes, bits, false, symbols);
  for (int i = 0; i < size; i++) {
    if (!symbols[i].length) {
      table.skip[i] = kEscape << 8;
      continue;
    }
    int length = symbols[i].length, advance = symbols[i].advance;
    while (advance < kEndOfBlock && length < bits) {
      const Symbol next = symbols[(i << length) & (size - 1)];
      if (!next.length || length + next.code_length > bits || length + next.length > kMaxAcLength ||
          advance + (next.advance & 127) > 63)
        break;
      length += next.length;
      advance += next.advance;
    }
    table.skip[i] = uint16_t(length | advance << 8);
  }
  table.skip_bits = bits;
}

template <class Table>
TableCache::Slot<Table>& TableCache::find(Slot<Table> (&slots)[kCapacity], const HuffmanSpec& spec,
                                          uint64_t clock, bool& hit) {
  const uint64_t hash = hash_of(spec);
  Slot<Table>* oldest = &slots[0];
  for (Slot<Table>& slot : slots) {
    if (slot.used && slot.hash == hash && same(slot.spec, spec)) {
      slot.used = clock;
      hit = true;
      return slot;
    }
    if (slot.used < oldest->used) oldest = &slot;
  }
  hit = false;
  oldest->spec = spec;
  oldest->hash = hash;
  oldest->used = clock;
  return *oldest;
}

const DcTable* TableCache::dc(const HuffmanSpec& spec) {
  bool hit;
  Slot<DcTable>& slot = find(dc_, spec, ++clock_, hit);
  if (hit) return &slot.table;
  // Sizes above 11 cannot occur in 8-bit images; libjpeg decodes up to 15 and fails above.
  const uint8_t* end = spec.symbols + spec.size;
  const bool sound = std::all_of(spec.symbols, end, [](uint8_t size) { return size <= 11; });
  if (!sound || !assign_codes(slot.table.codes, spec)) {
    slot.used = 0;
    return nullptr;
  }
  build_dc(slot.table, spec);
  return &slot.table;
}

AcTable* TableCache::ac(const HuffmanSpec& spec) {
  bool hit;
  Slot<AcTable>& slot = find(ac_, spec, ++clock_, hit);
  if (hit) return &slot.table;
  slot.table.has_lookup = false;
  slot.table.skip_bits = 0;
  if (!assign_codes(slot.table.codes, spec)) {
    slot.used = 0;
    return nullptr;
  }
  return &slot.table;
}

}  // namespace stoker::jpeg
