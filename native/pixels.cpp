#include "pixels.hpp"

#include <algorithm>
#include <cstring>

namespace stoker {
namespace {

Rect intersect(const Rect& a, const Rect& b) {
  const int x = std::max(a.x, b.x), y = std::max(a.y, b.y);
  return {x, y, std::max(0, std::min(a.right(), b.right()) - x),
          std::max(0, std::min(a.bottom(), b.bottom()) - y)};
}

// Index of the source sample that a padded position shows; numpy's names for the modes. Valid for
// pads of any size that resolve() lets through: reflect needs pad < size, symmetric pad <= size.
int mirrored(int position, int size, PadMode mode) {
  if (mode == PadMode::edge) return std::clamp(position, 0, size - 1);
  const int edge = mode == PadMode::symmetric ? 1 : 0;
  if (position < 0) position = -position - edge;
  if (position >= size) position = 2 * (size - 1) - position + edge;
  return std::clamp(position, 0, size - 1);
}

void fill_row(uint8_t* row, int pixels, const uint8_t* fill) {
  for (int i = 0; i < pixels; i++) std::memcpy(row + 3 * i, fill, 3);
}

// Copies the image, moved by (-x, -y), into `wanted`; what lies outside of the image becomes
// `fill`.
void copy_or_fill(const View& source, int x, int y, const Rect& wanted, const uint8_t* fill,
                  uint8_t* out) {
  const Rect moved{wanted.x + x, wanted.y + y, wanted.width, wanted.height};
  const Rect inside = intersect(moved, source.rect);
  for (int row = 0; row < wanted.height; row++, out += static_cast<size_t>(wanted.width) * 3) {
    const int from = moved.y + row;
    if (inside.width <= 0 || from < inside.y || from >= inside.bottom()) {
      fill_row(out, wanted.width, fill);
      continue;
    }
    const int left = inside.x - moved.x;
    fill_row(out, left, fill);
    std::memcpy(out + 3 * left,
                source.pixels + (from - source.rect.y) * source.stride +
                    static_cast<ptrdiff_t>(inside.x - source.rect.x) * 3,
                static_cast<size_t>(inside.width) * 3);
    fill_row(out + 3 * (left + inside.width), wanted.width - left - inside.width, fill);
  }
}

}  // namespace

Rect source_region(const Step& step, int width, int height, const Rect& wanted) {
  const Rect whole{0, 0, width, height};
  switch (step.kind) {
    case Step::Kind::crop:
      return intersect({wanted.x + step.x, wanted.y + step.y, wanted.width, wanted.height}, whole);
    case Step::Kind::flip_x: return {width - wanted.right(), wanted.y, wanted.width, wanted.height};
    case Step::Kind::flip_y:
      return {wanted.x, height - wanted.bottom(), wanted.width, wanted.height};
    case Step::Kind::pad:
      if (step.mode != PadMode::constant) return whole;
      return intersect({wanted.x - step.x, wanted.y - step.y, wanted.width, wanted.height}, whole);
    case Step::Kind::transpose: return {wanted.y, wanted.x, wanted.height, wanted.width};
    case Step::Kind::sharpness:
      return intersect({wanted.x - 1, wanted.y - 1, wanted.width + 2, wanted.height + 2}, whole);
    case Step::Kind::contrast:
    case Step::Kind::auto_contrast:
    case Step::Kind::equalize:
    case Step::Kind::affine:
    case Step::Kind::perspective: return whole;
    default: return wanted;
  }
}

void apply_crop(const View& source, const Step& step, const Rect& wanted, uint8_t* out) {
  const uint8_t black[3] = {0, 0, 0};
  copy_or_fill(source, step.x, step.y, wanted, black, out);
}

void apply_pad(const View& source, const Step& step, int width, int height, const Rect& wanted,
               uint8_t* out) {
  if (step.mode == PadMode::constant) {
    copy_or_fill(source, -step.x, -step.y, wanted, step.fill, out);
    return;
  }
  for (int row = 0; row < wanted.height; row++) {
    const int from = mirrored(wanted.y + row - step.y, height, step.mode);
    const uint8_t* line = source.pixels + (from - source.rect.y) * source.stride;
    for (int i = 0; i < wanted.width; i++, out += 3) {
      const int at = mirrored(wanted.x + i - step.x, width, step.mode);
      std::memcpy(out, line + static_cast<ptrdiff_t>(at - source.rect.x) * 3, 3);
    }
  }
}

void apply_flip_x(const View& source, uint8_t* out) {
  for (int row = 0; row < source.rect.height; row++) {
    const uint8_t* line = source.pixels + row * source.stride;
    for (int i = source.rect.width; i-- > 0; out += 3) std::memcpy(out, line + 3 * i, 3);
  }
}

void apply_flip_y(const View& source, uint8_t* out) {
  const size_t row_bytes = static_cast<size_t>(source.rect.width) * 3;
  for (int row = source.rect.height; row-- > 0; out += row_bytes)
    std::memcpy(out, source.pixels + row * source.stride, row_bytes);
}

void apply_transpose(const View& source, uint8_t* out) {
  constexpr int kBlock = 16;  // rows that are read together: their cache lines are used whole
  const int width = source.rect.height, height = source.rect.width;
  for (int left = 0; left < width; left += kBlock) {
    const int right = std::min(left + kBlock, width);
    for (int y = 0; y < height; y++) {
      const uint8_t* column = source.pixels + static_cast<ptrdiff_t>(y) * 3;
      uint8_t* row = out + static_cast<ptrdiff_t>(y) * width * 3;
      for (int x = left; x < right; x++) std::memcpy(row + 3 * x, column + x * source.stride, 3);
    }
  }
}

void apply_gray(uint8_t* pixels, ptrdiff_t stride, int width, int height) {
  for (int row = 0; row < height; row++, pixels += stride)
    for (int i = 0; i < width; i++) {
      uint8_t* p = pixels + 3 * i;
      const unsigned luma = (19595u * p[0] + 38470u * p[1] + 7471u * p[2] + 32768u) >> 16;
      p[0] = p[1] = p[2] = static_cast<uint8_t>(luma);
    }
}

}  // namespace stoker
