#include "plan.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "resolver.hpp"

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
//   adjust               kind of step, amount; see Step
//   affine               width, height, matrix x 6, filter, fill x 3; see Step
//   color_jitter         of brightness, contrast, saturation and hue: present, from, to; fused
//   random_operation     probability, exact (1: compared in double, 0: in float32), operation,
//                          magnitude
//   augment              version, rounds, filter, fill x 3, drawn (1: each round draws one of the
//                          magnitudes), bins, index, magnitudes per operation, operations; of each
//                          operation: itself, signed, graded, its magnitudes
//   auto_augment         version, filter, fill x 3, bins, policies; of each policy twice:
//                          operation, probability, signed, magnitude, index
//   random_rotation      degrees from, to, fused, expand, centred, center x, y, filter, fill x 3
//   random_affine        degrees from, to, translate given, x, y, scale given, from, to, shears
//                          (0, 2 or 4), from, to, from, to, center given, x, y, filter, fill x 3,
//                          fused, version
//   random_erasing       probability, scale from, to, log(ratio) from, to, fused, bits of the value
//                          in each of 3 channels
//   crop                 x, y, width, height; may lie outside of the image, where pixels are 0
//   mirror_x, mirror_y   -
//   transpose            -; rows become columns
//   perspective          width, height, matrix x 8, filter, fill x 3; see Step
//   look_up              the 256 bytes that replace each red, then each green, then each blue one;
//                          six bytes in a number, the first one counts most
//
// An operation is its place in enum Operation. A magnitude that is NaN is that of `index` of `bins`
// between 0 and 150 / 331 of the image's width or height, which the operation translates by.
//
// In the order of Op::Kind.
struct Description {
  std::string_view name;
  Op::Kind kind;
  size_t numbers;  // at least, for augment and auto_augment
  bool draws;
  int steps;  // that it adds at most; of augment in each round
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
    {"adjust", Op::Kind::adjust, 2, false, 1},
    {"affine", Op::Kind::affine, 12, false, 1},
    {"color_jitter", Op::Kind::color_jitter, 13, true, 4},
    {"random_operation", Op::Kind::random_operation, 4, true, 2},
    {"augment", Op::Kind::augment, 11, true, 2},
    {"auto_augment", Op::Kind::auto_augment, 7, true, 4},
    {"random_rotation", Op::Kind::random_rotation, 11, true, 2},
    {"random_affine", Op::Kind::random_affine, 22, true, 1},
    {"random_erasing", Op::Kind::random_erasing, 9, true, 1},
    {"crop", Op::Kind::crop, 4, false, 1},
    {"mirror_x", Op::Kind::mirror_x, 0, false, 1},
    {"mirror_y", Op::Kind::mirror_y, 0, false, 1},
    {"transpose", Op::Kind::transpose, 0, false, 1},
    {"perspective", Op::Kind::perspective, 14, false, 1},
    {"look_up", Op::Kind::look_up, kTableNumbers, false, 1},
};

void require(bool condition, std::string_view name, const char* what) {
  if (!condition) throw std::invalid_argument(std::string(name) + ": " + what);
}

bool whole(double value, double least, double most) {
  return value >= least && value <= most && value == std::trunc(value);
}

bool finite(const double* from, const double* to) {
  return std::all_of(from, to, [](double v) { return std::isfinite(v); });
}

bool ascending(const double* range, double least, double most) {
  return range[0] >= least && range[0] <= range[1] && range[1] <= most;
}

// Filter and fill of an affine step.
bool sampling(const double* n) {
  return (n[0] == 0 || n[0] == 2 || n[0] == 4) &&
         std::all_of(n + 1, n + 4, [](double v) { return whole(v, 0, 255); });
}

// A colour step and its amount.
bool adjustment(double kind, double amount) {
  if (!whole(kind, static_cast<double>(Step::Kind::brightness),
             static_cast<double>(Step::Kind::equalize)))
    return false;
  switch (static_cast<Step::Kind>(static_cast<int>(kind))) {
    case Step::Kind::hue: return whole(amount, -255, 255);
    case Step::Kind::posterize: return whole(amount, 1, 8);
    default: return std::fabs(amount) <= 1e6;
  }
}

// An operation of a policy with its magnitude; NaN is allowed where a policy translates.
bool operation(double operation, double magnitude, bool relative) {
  if (!whole(operation, 0, kOperations - 1)) return false;
  const auto kind = static_cast<Operation>(static_cast<int>(operation));
  if (kind == Operation::posterize) return whole(magnitude, 1, 8);
  if (std::isnan(magnitude))
    return relative && (kind == Operation::translate_x || kind == Operation::translate_y);
  return std::fabs(magnitude) < 1e5;
}

void validate_augment(std::string_view name, const std::vector<double>& numbers) {
  const double* n = numbers.data();
  require(whole(n[0], 1, 2), name, "version 1 or 2");
  require(whole(n[1], 0, kMaxSteps), name, "rounds out of range");
  require(sampling(n + 2), name, "filter or fill out of range");
  require(whole(n[7], 2, 1e6) && whole(n[8], 0, n[7] - 1), name, "bins or index out of range");
  require(whole(n[9], 1, 1e6) && whole(n[10], 1, 100), name, "unknown operations");
  const auto count = static_cast<size_t>(n[9]), entries = static_cast<size_t>(n[10]);
  require(numbers.size() == 11 + entries * (3 + count), name, "wrong number of numbers");
  for (const double* entry = n + 11; entry < n + numbers.size(); entry += 3 + count)
    for (size_t i = 0; i < count; ++i)
      require(operation(entry[0], entry[3 + i], true), name, "unknown operation or magnitude");
}

void validate_auto_augment(std::string_view name, const std::vector<double>& numbers) {
  const double* n = numbers.data();
  require(whole(n[0], 1, 2), name, "version 1 or 2");
  require(sampling(n + 1), name, "filter or fill out of range");
  require(whole(n[5], 2, 1e6) && whole(n[6], 1, 1e4), name, "bins or policies out of range");
  require(numbers.size() == 7 + static_cast<size_t>(n[6]) * 10, name, "wrong number of numbers");
  for (const double* entry = n + 7; entry < n + numbers.size(); entry += 5)
    require(operation(entry[0], entry[3], true) && std::isfinite(entry[1]) &&
                whole(entry[4], 0, n[5] - 1),
            name, "unknown operation or magnitude");
}

void validate(std::string_view name, const Op& op) {
  const double* n = op.numbers.data();
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
    case Op::Kind::gray: break;
    case Op::Kind::crop:
      require(whole(n[0], -double(kMaxSide), double(kMaxSide)), name, "x out of range");
      require(whole(n[1], -double(kMaxSide), double(kMaxSide)), name, "y out of range");
      require(side(n[2]) && side(n[3]), name, "size out of range");
      break;
    case Op::Kind::mirror_x:
    case Op::Kind::mirror_y:
    case Op::Kind::transpose: break;
    case Op::Kind::adjust:
      require(adjustment(n[0], n[1]), name, "unknown step or amount out of range");
      break;
    case Op::Kind::affine:
      require(side(n[0]) && side(n[1]), name, "size out of range");
      require(finite(n + 2, n + 8), name, "matrix not finite");
      require(sampling(n + 8), name, "filter or fill out of range");
      break;
    case Op::Kind::look_up:
      require(std::all_of(n, n + kTableNumbers,
                          [](double v) { return whole(v, 0, 281474976710655.0); }),
              name, "number out of range");
      break;
    case Op::Kind::perspective:
      require(side(n[0]) && side(n[1]), name, "size out of range");
      require(finite(n + 2, n + 10), name, "matrix not finite");
      require(sampling(n + 10), name, "filter or fill out of range");
      break;
    case Op::Kind::color_jitter:
      for (int i = 0; i < 4; ++i)
        require(n[3 * i] == 0 || ascending(n + 3 * i + 1, i == 3 ? -0.5 : 0.0, i == 3 ? 0.5 : 1e6),
                name, "range out of bounds");
      break;
    case Op::Kind::random_operation:
      require(std::isfinite(n[0]), name, "probability not finite");
      require(operation(n[2], n[3], false), name, "unknown operation or magnitude");
      break;
    case Op::Kind::augment: validate_augment(name, op.numbers); break;
    case Op::Kind::auto_augment: validate_auto_augment(name, op.numbers); break;
    case Op::Kind::random_rotation:
      require(ascending(n, -1e6, 1e6) && finite(n, n + 7), name, "degrees or center out of range");
      require(sampling(n + 7), name, "filter or fill out of range");
      break;
    case Op::Kind::random_affine:
      require(finite(n, n + 16) && ascending(n, -1e6, 1e6), name, "degrees or center out of range");
      require(n[2] == 0 || std::max(n[3], n[4]) <= 1, name, "translation out of range");
      require(n[2] == 0 || std::min(n[3], n[4]) >= 0, name, "translation out of range");
      require(n[5] == 0 || ascending(n + 6, 1e-6, 1e6), name, "scale out of range");
      require(n[8] == 0 || n[8] == 2 || n[8] == 4, name, "0, 2 or 4 shears");
      for (int i = 0; i < 2; ++i)
        require(n[8] <= 2 * i || ascending(n + 9 + 2 * i, -1e6, 1e6), name, "shear out of range");
      require(whole(n[21], 1, 2), name, "version 1 or 2");
      require(sampling(n + 16), name, "filter or fill out of range");
      break;
    case Op::Kind::random_erasing:
      require(std::isfinite(n[0]), name, "probability not finite");
      require(ascending(n + 1, 0, 1), name, "scale out of range");
      require(std::all_of(n + 6, n + 9, [](double v) { return whole(v, 0, 4294967295.0); }), name,
              "value out of range");
      break;
  }
}

}  // namespace

void Plan::add(std::string_view name, std::span<const double> numbers) {
  const auto found = std::find_if(std::begin(kDescriptions), std::end(kDescriptions),
                                  [&](const Description& d) { return d.name == name; });
  require(found != std::end(kDescriptions), name, "unknown operation");
  const bool open = found->kind == Op::Kind::augment || found->kind == Op::Kind::auto_augment;
  require(open ? numbers.size() >= found->numbers : numbers.size() == found->numbers, name,
          "wrong number of numbers");
  Op op;
  op.kind = found->kind;
  op.numbers.assign(numbers.begin(), numbers.end());
  validate(name, op);
  const int rounds = op.kind == Op::Kind::augment ? static_cast<int>(numbers[1]) : 1;
  require(most_steps + found->steps * rounds <= kMaxSteps, name, "too many operations");
  const bool flip = op.kind == Op::Kind::flip_x || op.kind == Op::Kind::flip_y;
  require(erasures.empty() || flip || op.kind == Op::Kind::random_erasing, name,
          "only flips may follow an erasing");
  if (op.kind == Op::Kind::random_resized_crop || op.kind == Op::Kind::random_erasing) {
    const int place = op.kind == Op::Kind::random_erasing ? 3 : 4;
    const bool fused = numbers[op.kind == Op::Kind::random_erasing ? 5 : 9] != 0;
    op.exponentials = find_exp_table(static_cast<float>(op.numbers[place]),
                                     static_cast<float>(op.numbers[place + 1]), fused);
    require(op.exponentials != nullptr, name, "exponentials not proven for this ratio");
  }
  if (op.kind == Op::Kind::random_erasing) {
    op.erasure = static_cast<int>(erasures.size());
    erasures.push_back({static_cast<uint32_t>(numbers[6]), static_cast<uint32_t>(numbers[7]),
                        static_cast<uint32_t>(numbers[8])});
  }
  most_steps += found->steps * rounds;
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

}  // namespace stoker
