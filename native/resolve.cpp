#include <algorithm>
#include <cmath>

#include "resolver.hpp"

namespace stoker {
namespace {

// Python's round() of a double that fits: half to even, the processor's default rounding.
int64_t round_half_even(double value) { return static_cast<int64_t>(std::nearbyint(value)); }

// int(a * b / c) of Python: one correctly rounded division of exact integers.
int64_t divide(int64_t product, int64_t by) {
  return static_cast<int64_t>(static_cast<double>(product) / static_cast<double>(by));
}

// Where the image is smaller, torchvision pads it with zeros to the crop's size, which is a crop
// that starts outside; else the crop is centred, an odd difference rounded half to even.
int64_t centred(int64_t size, int64_t wanted) {
  if (wanted > size) return -((wanted - size) / 2);
  return round_half_even(static_cast<double>(size - wanted) / 2.0);
}

}  // namespace

bool Resolver::apply(const Op& op) {
  const double* n = op.numbers.data();
  switch (op.kind) {
    case Op::Kind::resize: return resize_op(n);
    case Op::Kind::center_crop: return center_crop(integer(n[0]), integer(n[1]));
    case Op::Kind::random_crop: return random_crop(n);
    case Op::Kind::random_resized_crop: return random_resized_crop(op);
    case Op::Kind::flip_x: return !happens(n[0]) || simple(Step::Kind::flip_x);
    case Op::Kind::flip_y: return !happens(n[0]) || simple(Step::Kind::flip_y);
    case Op::Kind::pad: return pad(n, n + 4);
    case Op::Kind::gray: return simple(Step::Kind::gray);
    case Op::Kind::random_gray: return !happens(n[0]) || simple(Step::Kind::gray);
    case Op::Kind::adjust: return adjust(static_cast<Step::Kind>(static_cast<int>(n[0])), n[1]);
    case Op::Kind::affine: {
      const double matrix[6] = {n[2], n[3], n[4], n[5], n[6], n[7]};
      return affine(matrix, integer(n[0]), integer(n[1]), sampling_of(n + 8));
    }
    case Op::Kind::perspective: return perspective(n);
    case Op::Kind::look_up: return look_up(n);
    case Op::Kind::color_jitter: return color_jitter(n);
    case Op::Kind::random_operation: return random_operation(n);
    case Op::Kind::augment: return augment(n);
    case Op::Kind::auto_augment: return auto_augment(n);
    case Op::Kind::random_rotation: return random_rotation(n);
    case Op::Kind::random_affine: return random_affine(n);
    case Op::Kind::random_erasing: return random_erasing(op);
    case Op::Kind::crop: return crop(integer(n[0]), integer(n[1]), integer(n[2]), integer(n[3]));
    case Op::Kind::mirror_x: return simple(Step::Kind::flip_x);
    case Op::Kind::mirror_y: return simple(Step::Kind::flip_y);
    case Op::Kind::transpose: return add(Step::Kind::transpose, height_, width_) != nullptr;
  }
  return false;
}

void Resolver::finish() {
  steps_.width = static_cast<int>(width_);
  steps_.height = static_cast<int>(height_);
}

Step* Resolver::add(Step::Kind kind, int64_t width, int64_t height) {
  if (width < 1 || height < 1 || width > kMaxSide || height > kMaxSide ||
      width * height > kMaxArea || steps_.count == kMaxSteps)
    return nullptr;
  Step& step = steps_.items[steps_.count++];
  step = Step{};
  step.kind = kind;
  step.width = static_cast<int>(width);
  step.height = static_cast<int>(height);
  width_ = width;
  height_ = height;
  return &step;
}

bool Resolver::crop(int64_t x, int64_t y, int64_t width, int64_t height) {
  if (x == 0 && y == 0 && width == width_ && height == height_) return true;
  Step* step = add(Step::Kind::crop, width, height);
  if (!step) return false;
  step->x = static_cast<int>(x);
  step->y = static_cast<int>(y);
  return true;
}

bool Resolver::resize(int64_t width, int64_t height, double filter) {
  if (width == width_ && height == height_) return true;
  Step* step = add(Step::Kind::resize, width, height);
  if (!step) return false;
  step->filter = static_cast<Filter>(static_cast<int>(filter));
  return true;
}

bool Resolver::resize_op(const double* n) {
  if (n[0] == 2) return resize(integer(n[2]), integer(n[1]), n[4]);
  const int64_t shorter = std::min(width_, height_), longer = std::max(width_, height_);
  const int64_t max_size = integer(n[3]);
  int64_t new_shorter, new_longer;
  if (n[0] == 0) {
    new_shorter = divide(max_size * shorter, longer);
    new_longer = max_size;
  } else {
    new_shorter = integer(n[1]);
    new_longer = divide(new_shorter * longer, shorter);
    if (max_size > 0 && new_longer > max_size) {
      new_shorter = divide(max_size * new_shorter, new_longer);
      new_longer = max_size;
    }
  }
  return width_ <= height_ ? resize(new_shorter, new_longer, n[4])
                           : resize(new_longer, new_shorter, n[4]);
}

bool Resolver::center_crop(int64_t height, int64_t width) {
  return crop(centred(width_, width), centred(height_, height), width, height);
}

// sides: left, top, right, bottom; look: mode, fill.
bool Resolver::pad(const double* sides, const double* look) {
  const int64_t left = integer(sides[0]), top = integer(sides[1]), right = integer(sides[2]),
                bottom = integer(sides[3]);
  if (left == 0 && top == 0 && right == 0 && bottom == 0) return true;
  const PadMode mode = static_cast<PadMode>(static_cast<int>(look[0]));
  // numpy repeats reflections of reflections by rules of its own; such images go to Pillow and
  // numpy.
  if (mode == PadMode::reflect || mode == PadMode::symmetric) {
    const int64_t missing = mode == PadMode::reflect ? 1 : 0;
    if (std::max(left, right) > width_ - missing || std::max(top, bottom) > height_ - missing)
      return false;
  }
  Step* step = add(Step::Kind::pad, width_ + left + right, height_ + top + bottom);
  if (!step) return false;
  step->x = static_cast<int>(left);
  step->y = static_cast<int>(top);
  step->mode = mode;
  for (int c = 0; c < 3; ++c) step->fill[c] = static_cast<uint8_t>(look[1 + c]);
  return true;
}

bool Resolver::random_crop(const double* n) {
  const int64_t height = integer(n[0]), width = integer(n[1]);
  const bool pad_if_needed = n[6] != 0, second = n[11] == 2;
  double sides[4] = {n[2], n[3], n[4], n[5]};
  if (second) {
    // All padding at once, and a draw only for the sides that are cropped.
    const int64_t padded_width = width_ + integer(sides[0] + sides[2]);
    const int64_t padded_height = height_ + integer(sides[1] + sides[3]);
    if (pad_if_needed && padded_height < height) {
      sides[1] += double(height - padded_height);
      sides[3] += double(height - padded_height);
    }
    if (pad_if_needed && padded_width < width) {
      sides[0] += double(width - padded_width);
      sides[2] += double(width - padded_width);
    }
    if (!pad(sides, n + 7) || height_ < height || width_ < width) return false;
    const int64_t y = height_ > height ? generator_.below(height_ - height + 1) : 0;
    const int64_t x = width_ > width ? generator_.below(width_ - width + 1) : 0;
    return crop(x, y, width, height);
  }
  // The given padding, then the width, then the height; two draws unless the size fits exactly.
  if (!pad(sides, n + 7)) return false;
  if (pad_if_needed && width_ < width) {
    const double more = double(width - width_), across[4] = {more, 0, more, 0};
    if (!pad(across, n + 7)) return false;
  }
  if (pad_if_needed && height_ < height) {
    const double more = double(height - height_), along[4] = {0, more, 0, more};
    if (!pad(along, n + 7)) return false;
  }
  if (height_ < height || width_ < width) return false;
  if (height_ == height && width_ == width) return true;
  const int64_t y = generator_.below(height_ - height + 1);
  const int64_t x = generator_.below(width_ - width + 1);
  return crop(x, y, width, height);
}

bool Resolver::random_resized_crop(const Op& op) {
  const double* n = op.numbers.data();
  const float scale_from = static_cast<float>(n[2]), scale_to = static_cast<float>(n[3]);
  const double least_ratio = n[6], greatest_ratio = n[7];
  const bool fused = n[9] != 0;
  const double area = static_cast<double>(width_ * height_);
  int64_t x = 0, y = 0, width = 0, height = 0;
  bool found = false;
  for (int attempt = 0; attempt < 10 && !found; ++attempt) {
    const double target = area * generator_.uniform(scale_from, scale_to, fused);
    const double aspect = op.exponentials->value(generator_.next() & 0xffffffu);
    const double w = std::nearbyint(std::sqrt(target * aspect));
    const double h = std::nearbyint(std::sqrt(target / aspect));
    if (w > 0 && h > 0 && w <= static_cast<double>(width_) && h <= static_cast<double>(height_)) {
      width = integer(w);
      height = integer(h);
      y = generator_.below(height_ - height + 1);
      x = generator_.below(width_ - width + 1);
      found = true;
    }
  }
  if (!found) {
    const double ratio = static_cast<double>(width_) / static_cast<double>(height_);
    width = width_;
    height = height_;
    if (ratio < least_ratio)
      height = round_half_even(static_cast<double>(width_) / least_ratio);
    else if (ratio > greatest_ratio)
      width = round_half_even(static_cast<double>(height_) * greatest_ratio);
    // floor division; both differences may be negative only if the ratios contradict the image's
    if (height > height_ || width > width_) return false;
    y = (height_ - height) / 2;
    x = (width_ - width) / 2;
  }
  return crop(x, y, width, height) && resize(integer(n[1]), integer(n[0]), n[8]);
}

Status resolve(const Plan& plan, int width, int height, Generator& generator, Steps& steps) {
  steps.count = 0;
  if (width < 1 || height < 1 || width > kMaxSide || height > kMaxSide) return Status::bad_geometry;
  Resolver resolver(width, height, generator, steps);
  for (const Op& op : plan.ops) {
    if (!resolver.apply(op)) return Status::bad_geometry;
  }
  resolver.finish();
  return Status::ok;
}

}  // namespace stoker
