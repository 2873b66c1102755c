#include "plan.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace stoker {
namespace {

// Numbers of each operation, in order. Sizes are (height, width); a filter is its place in enum
// Filter, a padding mode its place in enum PadMode; fill is red, green, blue in 0..255.
//
//   resize               sides (0, 1 or 2), first, second, max_size (0: none), filter
//                          2 sides: height and width; 1: the shorter edge; 0: only max_size, the
//                          longer
//   center_crop          height, width
//   random_crop          height, width, left, top, right, bottom, pad_if_needed, mode, fill x 3,
//   version
//                          version 1 or 2: torchvision.transforms or torchvision.transforms.v2
//   random_resized_crop  height, width, scale from, to, log(ratio) from, to, least and greatest
//   ratio, filter,
//                          fused (see Generator::uniform)
//   flip_x, flip_y       probability
//   pad                  left, top, right, bottom, mode, fill x 3
//   gray                 -
//   random_gray          probability
//   crop                 x, y, width, height; may lie outside of the image, where pixels are 0
//   mirror_x, mirror_y   -
//
// In the order of Op::Kind.
struct Description {
  std::string_view name;
  Op::Kind kind;
  size_t numbers;
  bool draws;
  int steps;  // that it adds at most
};

constexpr Description kDescriptions[] = {
    {"resize", Op::Kind::resize, 5, false, 1},
    {"center_crop", Op::Kind::center_crop, 2, false, 1},
    {"random_crop", Op::Kind::random_crop, 12, true, 4},
    {"random_resized_crop", Op::Kind::random_resized_crop, 10, true, 2},
    {"flip_x", Op::Kind::flip_x, 1, true, 1},
    {"flip_y", Op::Kind::flip_y, 1, true, 1},
    {"pad", Op::Kind::pad, 8, false, 1},
    {"gray", Op::Kind::gray, 0, false, 1},
    {"random_gray", Op::Kind::random_gray, 1, true, 1},
    {"crop", Op::Kind::crop, 4, false, 1},
    {"mirror_x", Op::Kind::mirror_x, 0, false, 1},
    {"mirror_y", Op::Kind::mirror_y, 0, false, 1},
};

// Beyond these the sample goes to Pillow, which has limits of its own.
constexpr int64_t kMaxSide = 1 << 20;
constexpr int64_t kMaxArea = int64_t{1} << 28;

void require(bool condition, std::string_view name, const char* what) {
  if (!condition) throw std::invalid_argument(std::string(name) + ": " + what);
}

bool whole(double value, double least, double most) {
  return value >= least && value <= most && value == std::trunc(value);
}

void validate(std::string_view name, const Op& op) {
  const double* n = op.numbers;
  const auto side = [](double value) { return whole(value, 1, double(kMaxSide)); };
  const auto padding = [&](const double* at) {
    return std::all_of(at, at + 4, [](double v) { return whole(v, 0, double(kMaxSide)); });
  };
  const auto fill = [&](const double* at) {
    return whole(at[0], 0, 3) &&
           std::all_of(at + 1, at + 4, [](double v) { return whole(v, 0, 255); });
  };
  switch (op.kind) {
    case Op::Kind::resize:
      require(whole(n[0], 0, 2), name, "0, 1 or 2 sides");
      require(n[0] < 1 || side(n[1]), name, "size out of range");
      require(n[0] < 2 || side(n[2]), name, "size out of range");
      require(whole(n[3], 0, double(kMaxSide)), name, "max_size out of range");
      require(n[0] > 0 || n[3] > 0, name, "neither size nor max_size");
      require(n[0] < 2 || n[3] == 0, name, "max_size with two sides");
      require(n[0] != 1 || n[3] == 0 || n[3] > n[1], name, "max_size not above size");
      require(whole(n[4], 0, 5), name, "unknown filter");
      break;
    case Op::Kind::center_crop: require(side(n[0]) && side(n[1]), name, "size out of range"); break;
    case Op::Kind::random_crop:
      require(side(n[0]) && side(n[1]), name, "size out of range");
      require(padding(n + 2), name, "padding out of range");
      require(fill(n + 7), name, "mode or fill out of range");
      require(whole(n[11], 1, 2), name, "version 1 or 2");
      break;
    case Op::Kind::random_resized_crop:
      require(side(n[0]) && side(n[1]), name, "size out of range");
      require(n[2] >= 0 && n[2] <= n[3] && std::isfinite(n[3]), name, "scale out of range");
      require(n[4] <= n[5] && std::fabs(n[4]) < 32 && std::fabs(n[5]) < 32, name,
              "log(ratio) out of range");
      require(n[6] > 0 && n[6] <= n[7] && std::isfinite(n[7]), name, "ratio out of range");
      require(whole(n[8], 0, 5), name, "unknown filter");
      break;
    case Op::Kind::flip_x:
    case Op::Kind::flip_y:
    case Op::Kind::random_gray: require(std::isfinite(n[0]), name, "probability not finite"); break;
    case Op::Kind::pad:
      require(padding(n), name, "padding out of range");
      require(fill(n + 4), name, "mode or fill out of range");
      break;
    case Op::Kind::crop:
      require(whole(n[0], -double(kMaxSide), double(kMaxSide)), name, "x out of range");
      require(whole(n[1], -double(kMaxSide), double(kMaxSide)), name, "y out of range");
      require(side(n[2]) && side(n[3]), name, "size out of range");
      break;
    case Op::Kind::gray:
    case Op::Kind::mirror_x:
    case Op::Kind::mirror_y: break;
  }
}

// Python's round() of a double that fits: half to even, the processor's default rounding.
int64_t round_half_even(double value) { return static_cast<int64_t>(std::nearbyint(value)); }

// One sample on its way through the operations: its size so far and the steps.
class Resolver {
 public:
  Resolver(int width, int height, Generator& generator, Steps& steps)
      : width_(width), height_(height), generator_(generator), steps_(steps) {
    steps_.count = 0;
  }

  bool apply(const Op& op) {
    const double* n = op.numbers;
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
      case Op::Kind::crop: return crop(integer(n[0]), integer(n[1]), integer(n[2]), integer(n[3]));
      case Op::Kind::mirror_x: return simple(Step::Kind::flip_x);
      case Op::Kind::mirror_y: return simple(Step::Kind::flip_y);
    }
    return false;
  }

  void finish() {
    steps_.width = static_cast<int>(width_);
    steps_.height = static_cast<int>(height_);
  }

 private:
  static int64_t integer(double value) { return static_cast<int64_t>(value); }

  // torch compares its float32 draw with the probability rounded to float32, and draws whatever it
  // is.
  bool happens(double probability) {
    return generator_.uniform() < static_cast<float>(probability);
  }

  // A step that leaves an image of this size, or null where that is out of bounds.
  Step* add(Step::Kind kind, int64_t width, int64_t height) {
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

  bool simple(Step::Kind kind) { return add(kind, width_, height_) != nullptr; }

  bool crop(int64_t x, int64_t y, int64_t width, int64_t height) {
    if (x == 0 && y == 0 && width == width_ && height == height_) return true;
    Step* step = add(Step::Kind::crop, width, height);
    if (!step) return false;
    step->x = static_cast<int>(x);
    step->y = static_cast<int>(y);
    return true;
  }

  bool resize(int64_t width, int64_t height, double filter) {
    if (width == width_ && height == height_) return true;
    Step* step = add(Step::Kind::resize, width, height);
    if (!step) return false;
    step->filter = static_cast<Filter>(static_cast<int>(filter));
    return true;
  }

  // int(a * b / c) of Python: one correctly rounded division of exact integers.
  static int64_t divide(int64_t product, int64_t by) {
    return static_cast<int64_t>(static_cast<double>(product) / static_cast<double>(by));
  }

  bool resize_op(const double* n) {
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

  // Where the image is smaller, torchvision pads it with zeros to the crop's size, which is a crop
  // that starts outside; else the crop is centred, an odd difference rounded half to even.
  static int64_t centred(int64_t size, int64_t wanted) {
    if (wanted > size) return -((wanted - size) / 2);
    return round_half_even(static_cast<double>(size - wanted) / 2.0);
  }

  bool center_crop(int64_t height, int64_t width) {
    return crop(centred(width_, width), centred(height_, height), width, height);
  }

  // sides: left, top, right, bottom; look: mode, fill.
  bool pad(const double* sides, const double* look) {
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

  bool random_crop(const double* n) {
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

  bool random_resized_crop(const Op& op) {
    const double* n = op.numbers;
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

  int64_t width_, height_;
  Generator& generator_;
  Steps& steps_;
};

}  // namespace

void Plan::add(std::string_view name, std::span<const double> numbers) {
  const auto found = std::find_if(std::begin(kDescriptions), std::end(kDescriptions),
                                  [&](const Description& d) { return d.name == name; });
  require(found != std::end(kDescriptions), name, "unknown operation");
  require(numbers.size() == found->numbers, name, "wrong number of numbers");
  int steps = found->steps;
  for (const Op& op : ops) steps += kDescriptions[static_cast<int>(op.kind)].steps;
  require(steps <= kMaxSteps, name, "too many operations");
  Op op;
  op.kind = found->kind;
  std::copy(numbers.begin(), numbers.end(), op.numbers);
  validate(name, op);
  if (op.kind == Op::Kind::random_resized_crop) {
    op.exponentials = find_exp_table(static_cast<float>(numbers[4]), static_cast<float>(numbers[5]),
                                     numbers[9] != 0);
    require(op.exponentials != nullptr, name, "exponentials not proven for this ratio");
  }
  draws = draws || found->draws;
  ops.push_back(std::move(op));
}

void Plan::add_all(std::span<const double> code) {
  while (!code.empty()) {
    const double place = code.front();
    require(whole(place, 0, double(std::size(kDescriptions) - 1)), "recorded", "unknown operation");
    const Description& description = kDescriptions[static_cast<size_t>(place)];
    require(code.size() > description.numbers, description.name, "numbers missing");
    add(description.name, code.subspan(1, description.numbers));
    code = code.subspan(1 + description.numbers);
  }
}

std::vector<OperationName> operations() {
  std::vector<OperationName> list;
  for (const Description& d : kDescriptions) list.push_back({d.name, d.numbers});
  return list;
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
