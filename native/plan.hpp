// What to do to one sample. A Plan is fixed per loader; resolve() turns it into concrete Steps for
// one image size and one generator, in the order and with the draws of torchvision. Steps know
// nothing of pixels.
#pragma once

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
  enum class Kind : uint8_t { crop, resize, flip_x, flip_y, pad, gray };
  Kind kind;
  int width = 0, height = 0;  // of the image after this step
  int x = 0, y = 0;  // crop: origin in the image before; may lie outside, where pixels are 0
                     // pad: pixels added on the left and at the top
  Filter filter = Filter::bilinear;
  PadMode mode = PadMode::constant;
  uint8_t fill[3] = {0, 0, 0};
};

constexpr int kMaxSteps = 32;

struct Steps {
  int count = 0;
  Step items[kMaxSteps];
  int width = 0, height = 0;  // of the result
};

// Declared here, defined in plan.cpp: one operation with its numbers.
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
    crop,
    mirror_x,
    mirror_y
  };
  Kind kind;
  double numbers[16] = {};
  std::shared_ptr<const ExpTable> exponentials;  // of random_resized_crop
};

struct Plan {
  std::vector<Op> ops;
  PassOrder order = PassOrder::cheaper_first;
  // Shared by the plans of single samples that end in the same tensor.
  std::shared_ptr<Conversion> conversion = std::make_shared<Conversion>();
  bool draws = false;  // any random op: the generator must be seeded per sample

  // Adds one operation; numbers as listed beside its name in plan.cpp. Throws
  // std::invalid_argument, also where random_resized_crop's exponentials have not been published
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
