// Huffman tables: as a file gives them, and the lookup tables that decoding uses.
#pragma once

#include <cstddef>
#include <cstdint>

namespace stoker::jpeg {

// The content of one DHT table: how many codes there are of each length, and their symbols in order
// of the codes.
struct HuffmanSpec {
  uint8_t counts[16];
  uint8_t symbols[256];  // zero beyond `size`
  int size;
};

// Canonical decoding, one symbol at a time, for the codes that the lookup tables leave out.
struct CanonicalCodes {
  // [length - 1]: first code beyond this length, left-aligned in 16 bits. Never decreases.
  alignas(32) uint16_t limit[16];
  int32_t offset[16];  // [length - 1]: index of a symbol minus its code
  uint8_t symbols[256];
};

constexpr int kDcBits = 9;
constexpr int kAcBits = 10;
constexpr int kSkipBitsSmall = 10;
constexpr int kSkipBitsLarge = 12;

// Note [DC lookup]
// The index is the next kDcBits bits. An entry holds the length of code plus difference in bits 0-7
// and a bias in bits 16-31, so that difference = int16((window >> (64 - length)) + bias): the index
// fixes the code and the sign, hence their share of the right-aligned bits is a constant. Zero: not
// in the table.
struct DcTable {
  uint32_t lookup[1 << kDcBits];
  CanonicalCodes codes;
};

// Note [AC lookup]
// The index is the next kAcBits bits. An entry holds one or two symbols with their coefficients:
//   bits 0-7    length of all codes and coefficient bits; 0: not in the table (then the advance is
//   64) bits 8-15   advance of k, the zigzag position; 128 is added by an end of block bits 16-23
//   the second symbol's share of the advance; 0 if there is one symbol only bits 24-31  64 - length
//   bits 32-47  value of the first of two coefficients
//   bits 48-63  bias of the last coefficient: value = int16((window >> (64 - length)) + bias), see
//   Note [DC lookup]
// At most kMaxAcLength bits long, so that three entries fit into a refilled window of 56 bits.
//
// Note [AC skip lookup]
// The index is the next skip_bits bits. An entry holds as many symbols as the index shows: length
// in bits 0-7, advance in bits 8-15, as above.
constexpr int kMaxAcLength = 18;
constexpr int kEndOfBlock = 128;
constexpr int kEscape = 64;

struct AcTable {
  alignas(64) uint64_t lookup[1 << kAcBits];
  alignas(64) uint16_t skip[1 << kSkipBitsLarge];
  CanonicalCodes codes;
  bool has_lookup;
  int skip_bits;  // 0: not built
};

// Both build their part of the table if it is missing.
void build_lookup(AcTable& table);
void build_skip(AcTable& table, int bits);

// One thread's decoding tables, kept from image to image: many files share the standard tables, and
// building costs several microseconds. A table stays valid until kCapacity - 1 others of its kind
// were asked for.
class TableCache {
 public:
  // nullptr: libjpeg refuses these codes, or they hold a symbol that this decoder does not decode.
  const DcTable* dc(const HuffmanSpec& spec);
  AcTable* ac(const HuffmanSpec& spec);

 private:
  static constexpr int kCapacity = 12;  // an image uses at most three of each kind

  template <class Table>
  struct Slot {
    HuffmanSpec spec;
    uint64_t hash = 0;
    uint64_t used = 0;  // 0: empty
    Table table;
  };
  template <class Table>
  static Slot<Table>& find(Slot<Table> (&slots)[kCapacity], const HuffmanSpec& spec, uint64_t clock,
                           bool& hit);

  uint64_t clock_ = 0;
  Slot<DcTable> dc_[kCapacity];
  Slot<AcTable> ac_[kCapacity];
};

}  // namespace stoker::jpeg
