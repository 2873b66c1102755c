// The segments before the entropy-coded data: what the frame looks like and which tables it uses.
#pragma once

#include <cstddef>
#include <cstdint>

#include "jpeg/decoder.hpp"
#include "jpeg/huffman.hpp"
#include "status.hpp"

namespace stoker::jpeg {

struct Component {
  int id;
  int h, v;           // sampling factors; 1 or 2, 1 for a single component
  int quant, dc, ac;  // tables
  int width, height;  // in samples
};

struct Frame {
  int width, height;
  int components;  // 1 or 3
  Component component[3];
  int max_h, max_v;    // equal to the factors of component 0; chroma has 1 x 1
  int mcus_x, mcus_y;  // of the whole image
  int blocks_per_mcu;
  int restart_interval;      // MCUs; 0: none
  uint16_t quant[4][64];     // row by row, not in zigzag order
  HuffmanSpec dc[4], ac[4];  // only those that components name are set
  size_t scan_offset;        // of the first entropy-coded byte
};

// Position in a block, row by row, of zigzag position k.
struct Zigzag {
  uint8_t natural[64];
  constexpr Zigzag() : natural() {
    int k = 0;
    for (int diagonal = 0; diagonal < 15; diagonal++) {
      for (int i = 0; i <= diagonal; i++) {
        const int row = diagonal & 1 ? i : diagonal - i, column = diagonal - row;
        if (row < 8 && column < 8) natural[k++] = uint8_t(row * 8 + column);
      }
    }
  }
};
constexpr Zigzag kZigzag;

// Reads everything up to and including the SOS segment. Safe on hostile input. Accepts single-scan
// Huffman-coded 8-bit frames of one component or of YCbCr in 4:4:4, 4:2:2, 4:4:0 or 4:2:0, whose
// segments neither libjpeg nor Pillow's own parser would warn about or refuse; anything else gives
// the status that tells why.
Status parse(const uint8_t* data, size_t size, const Limits& limits, Frame& frame);

}  // namespace stoker::jpeg
