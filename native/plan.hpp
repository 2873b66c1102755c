// What to do to one sample. A Plan is fixed per loader; resolve() turns it into concrete Steps for
// one image size and one generator, in the order and with the draws of torchvision. Steps know
// nothing of pixels.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "convert.hpp"
#include "geometry.hpp"
#include "random.hpp"
#include "resample.hpp"
#include "status.hpp"

namespace stoker {

enum class PadMode : uint8_t { constant, edge, reflect, symmetric };

struct Step {
  // In the order of kStepNames.
  enum class Kind : uint8_t {
    crop,
    resize,
    flip_x,
    flip_y,
    pad,
    gray,
    brightness,
    contrast,
    saturation,
    hue,
    sharpness,
    invert,
    posterize,
    solarize,
    auto_contrast,
    equalize,
    affine,
    erase,
    transpose,
    perspective,
    look_up
  };
  Kind kind;
  int width = 0, height = 0;  // of the image after this step
  int x = 0, y = 0;  // crop: origin in the image before; may lie outside, where pixels are 0
                     // pad: pixels added on the left and at the top
                     // erase: the rectangle's corner
  int erased_width = 0, erased_height = 0;
  int erasure = 0;    // erase: which of Plan::erasures
  double amount = 0;  // brightness, contrast, saturation, sharpness: the factor
                      // hue: added to Pillow's hue byte, modulo 256
                      // posterize: bits kept; solarize: the first value that is inverted
  // affine: the source of the centre of pixel (x, y) is (m0 X + m1 Y + m2, m3 X + m4 Y + m5) with
  // X = x + 0.5 and Y = y + 0.5; outside of the image it is `fill`. perspective: both are divided
  // by m6 X + m7 Y + 1.
  double matrix[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  // look_up: kTableNumbers numbers of the plan, see plan.cpp.
  const double* tables = nullptr;
  Filter filter = Filter::bilinear;
  PadMode mode = PadMode::constant;
  uint8_t fill[3] = {0, 0, 0};
};

constexpr std::string_view kStepNames[] = {
    "crop",          "resize",     "flip_x", "flip_y",    "pad",       "gray",        "brightness",
    "contrast",      "saturation", "hue",    "sharpness", "invert",    "posterize",   "solarize",
    "auto_contrast", "equalize",   "affine", "erase",     "transpose", "perspective", "look_up"};

constexpr int kMaxSteps = 32;
constexpr int kTableNumbers = 128;  // of look_up

struct Steps {
  int count = 0;
  Step items[kMaxSteps];
  int width = 0, height = 0;  // of the result
};

// One operation with its numbers, as listed in plan.cpp.
struct Op {
  enum class Kind : uint8_t {
    resize,
    center_crop,
    random_crop,
    random_resized_crop,
    flip_x,
    flip_y,
    pad,
    gray,
    random_gray,
    adjust,
    affine,
    color_jitter,
    random_operation,
    augment,
    auto_augment,
    random_rotation,
    random_affine,
    random_erasing,
    crop,
    mirror_x,
    mirror_y,
    transpose,
    perspective,
    look_up
  };
  Kind kind;
  std::vector<double> numbers;
  std::shared_ptr<const ExpTable> exponentials;  // of random_resized_crop and random_erasing
  int erasure = 0;                               // of random_erasing: which of Plan::erasures
};

struct Plan {
  std::vector<Op> ops;
  PassOrder order = PassOrder::cheaper_first;
  // Shared by the plans of single samples that end in the same tensor.
  std::shared_ptr<Conversion> conversion = std::make_shared<Conversion>();
  bool draws = false;  // any random op: the generator must be seeded per sample
  int most_steps = 0;  // that resolve() can give
  // What random_erasing writes into each channel: bit patterns of the tensor's values.
  std::vector<std::array<uint32_t, 3>> erasures;

  // Adds one operation; numbers as listed beside its name in plan.cpp. Throws
  // std::invalid_argument, also where an operation's exponentials have not been published
  // (Note [Proven exponentials]).
  void add(std::string_view name, std::span<const double> numbers);
  // Adds the operations of one recorded sample: each its place in operations() and its numbers.
  void add_all(std::span<const double> code);
};

struct OperationName {
  std::string_view name;
  size_t numbers;
};

// Every operation, in the order that add_all knows them by.
std::vector<OperationName> operations();

// Fills `steps` for an image of this size. Draws exactly what torchvision draws, in its order.
// Status::bad_geometry where torchvision raises or the plan cannot go on natively.
Status resolve(const Plan& plan, int width, int height, Generator& generator, Steps& steps);

}  // namespace stoker
