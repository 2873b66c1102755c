#include "colour.hpp"

#include <algorithm>
#include <cstring>

#include "colour_kernels.hpp"

namespace stoker {
namespace {

const ColourKernels& kernels_of(SimdLevel level) {
#if defined(STOKER_X86)
  if (level == SimdLevel::avx512) return kColourAvx512;
  if (level == SimdLevel::avx2) return kColourAvx2;
#endif
  static_cast<void>(level);
  return kColourScalar;
}

const uint8_t* at(const View& view, int x, int y) {
  return view.pixels + (y - view.rect.y) * view.stride +
         static_cast<ptrdiff_t>(x - view.rect.x) * 3;
}

// Image.blend of a constant and every byte.
void blend_table(int constant, float factor, uint8_t* table) {
  for (int i = 0; i < 256; ++i) {
    const float value = static_cast<float>(constant) + factor * static_cast<float>(i - constant);
    table[i] = static_cast<uint8_t>(static_cast<int>(std::clamp(value, 0.0f, 255.0f)));
  }
}

struct Histogram {
  uint32_t counts[3][256];

  explicit Histogram(const View& image) {
    // Two sets of counters: neighbours are often equal, and a counter's next increment waits for
    // its last.
    uint32_t other[3][256];
    std::memset(counts, 0, sizeof counts);
    std::memset(other, 0, sizeof other);
    for (int y = 0; y < image.rect.height; ++y) {
      const uint8_t* p = image.pixels + y * image.stride;
      int x = 0;
      for (; x + 2 <= image.rect.width; x += 2, p += 6) {
        ++counts[0][p[0]];
        ++counts[1][p[1]];
        ++counts[2][p[2]];
        ++other[0][p[3]];
        ++other[1][p[4]];
        ++other[2][p[5]];
      }
      if (x < image.rect.width)
        for (int c = 0; c < 3; ++c) ++counts[c][p[c]];
    }
    for (int c = 0; c < 3; ++c)
      for (int i = 0; i < 256; ++i) counts[c][i] += other[c][i];
  }
};

void auto_contrast_table(const uint32_t* counts, uint8_t* table) {
  int low = 0, high = 255;
  while (low < 255 && counts[low] == 0) ++low;
  while (high > 0 && counts[high] == 0) --high;
  const double scale = high > low ? 255.0 / (high - low) : 1.0;
  const double offset = high > low ? -low * scale : 0.0;
  for (int i = 0; i < 256; ++i)
    table[i] = static_cast<uint8_t>(std::clamp(static_cast<int>(i * scale + offset), 0, 255));
}

void equalize_table(const uint32_t* counts, uint8_t* table) {
  uint32_t total = 0, last = 0;
  for (int i = 0; i < 256; ++i) {
    total += counts[i];
    if (counts[i] != 0) last = counts[i];
  }
  const uint32_t step = (total - last) / 255;  // 0 also where there is one value only
  uint32_t sum = step / 2;
  for (uint32_t i = 0; i < 256; ++i) {
    table[i] = static_cast<uint8_t>(step == 0 ? i : std::min(sum / step, 255u));
    sum += counts[i];
  }
}

// int(mean of the luma + 0.5)
int mean_luma(const ColourKernels& kernels, const View& image) {
  uint64_t sum = 0;
  for (int y = 0; y < image.rect.height; ++y)
    sum += kernels.luma_sum(image.pixels + y * image.stride, image.rect.width);
  const double count = static_cast<double>(image.rect.width) * image.rect.height;
  return static_cast<int>(static_cast<double>(sum) / count + 0.5);
}

void unpack(const double* numbers, uint8_t* tables) {
  for (int i = 0; i < kTableNumbers; ++i) {
    auto six = static_cast<uint64_t>(numbers[i]);
    for (int k = 5; k >= 0; --k, six >>= 8) tables[6 * i + k] = static_cast<uint8_t>(six);
  }
}

void simple_table(const Step& step, uint8_t* table) {
  const int bits = static_cast<int>(step.amount);
  for (int i = 0; i < 256; ++i) {
    int value = i;
    if (step.kind == Step::Kind::invert) value = 255 - i;
    if (step.kind == Step::Kind::posterize) value = i & ~((1 << (8 - bits)) - 1);
    if (step.kind == Step::Kind::solarize && !(i < step.amount)) value = 255 - i;
    table[i] = static_cast<uint8_t>(value);
  }
}

}  // namespace

bool is_colour(Step::Kind kind) {
  switch (kind) {
    case Step::Kind::brightness:
    case Step::Kind::contrast:
    case Step::Kind::saturation:
    case Step::Kind::hue:
    case Step::Kind::invert:
    case Step::Kind::posterize:
    case Step::Kind::solarize:
    case Step::Kind::auto_contrast:
    case Step::Kind::equalize:
    case Step::Kind::look_up: return true;
    default: return false;
  }
}

bool needs_whole(Step::Kind kind) {
  return kind == Step::Kind::contrast || kind == Step::Kind::auto_contrast ||
         kind == Step::Kind::equalize;
}

void apply_colour(SimdLevel level, const Step& step, const View& whole, const Rect& wanted) {
  const ColourKernels& kernels = kernels_of(level);
  const float factor = static_cast<float>(step.amount);
  uint8_t tables[3][256];
  int count = 1;  // of tables: one for all channels, or three
  switch (step.kind) {
    case Step::Kind::brightness: blend_table(0, factor, tables[0]); break;
    case Step::Kind::contrast: blend_table(mean_luma(kernels, whole), factor, tables[0]); break;
    case Step::Kind::auto_contrast:
    case Step::Kind::equalize: {
      const Histogram histogram(whole);
      count = 3;
      for (int c = 0; c < 3; ++c)
        (step.kind == Step::Kind::equalize ? equalize_table : auto_contrast_table)(
            histogram.counts[c], tables[c]);
      break;
    }
    case Step::Kind::look_up:
      count = 3;
      unpack(step.tables, tables[0]);
      break;
    case Step::Kind::saturation:
    case Step::Kind::hue: count = 0; break;
    default: simple_table(step, tables[0]);
  }
  for (int y = wanted.y; y < wanted.bottom(); ++y) {
    uint8_t* row = const_cast<uint8_t*>(at(whole, wanted.x, y));
    if (step.kind == Step::Kind::saturation) {
      kernels.saturate(factor, wanted.width, row);
    } else if (step.kind == Step::Kind::hue) {
      kernels.turn_hue(static_cast<int>(step.amount), wanted.width, row);
    } else if (count == 1) {
      kernels.look_up(tables[0], static_cast<int64_t>(wanted.width) * 3, row);
    } else {
      for (int x = 0; x < wanted.width; ++x, row += 3)
        for (int c = 0; c < 3; ++c) row[c] = tables[c][row[c]];
    }
  }
}

void apply_sharpness(SimdLevel level, const View& source, const Step& step, int width, int height,
                     const Rect& wanted, uint8_t* out) {
  const ColourKernels& kernels = kernels_of(level);
  const size_t row_bytes = static_cast<size_t>(wanted.width) * 3;
  // Pillow leaves the image's outermost pixels as they are.
  const int left = std::max(wanted.x, 1), right = std::min(wanted.right(), width - 1);
  for (int y = wanted.y; y < wanted.bottom(); ++y, out += row_bytes) {
    std::memcpy(out, at(source, wanted.x, y), row_bytes);
    if (y == 0 || y == height - 1 || right <= left) continue;
    kernels.sharpen(static_cast<float>(step.amount), at(source, left, y - 1), at(source, left, y),
                    at(source, left, y + 1), static_cast<int64_t>(right - left) * 3,
                    out + static_cast<ptrdiff_t>(left - wanted.x) * 3);
  }
}

}  // namespace stoker
