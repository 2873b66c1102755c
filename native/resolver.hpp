// One sample on its way through a plan's operations: its size so far, and the steps. Private to
// resolve.cpp (geometry) and augment.cpp (colours, rotations, policies).
#pragma once

#include <cstdint>

#include "plan.hpp"

namespace stoker {

// Beyond these the sample goes to Pillow, which has limits of its own.
constexpr int64_t kMaxSide = 1 << 20;
constexpr int64_t kMaxArea = int64_t{1} << 28;

// What torchvision's augmentation policies choose from. Python knows an operation by its place.
enum class Operation : uint8_t {
  identity,
  shear_x,
  shear_y,
  translate_x,
  translate_y,
  rotate,
  brightness,
  saturation,
  contrast,
  sharpness,
  posterize,
  solarize,
  auto_contrast,
  equalize,
  invert
};
constexpr int kOperations = 15;

// How an affine step samples its source.
struct Sampling {
  Filter filter = Filter::nearest;
  uint8_t fill[3] = {0, 0, 0};
};

// From filter, red, green, blue.
Sampling sampling_of(const double* numbers);

class Resolver {
 public:
  Resolver(int width, int height, Generator& generator, Steps& steps)
      : width_(width), height_(height), generator_(generator), steps_(steps) {
    steps_.count = 0;
  }

  // False where torchvision raises or the plan cannot go on natively.
  bool apply(const Op& op);
  void finish();

 private:
  static int64_t integer(double value) { return static_cast<int64_t>(value); }

  // torch compares its float32 draw with the probability rounded to float32, and draws whatever it
  // is.
  bool happens(double probability) {
    return generator_.uniform() < static_cast<float>(probability);
  }
  float uniform(double from, double to, bool fused) {
    return generator_.uniform(static_cast<float>(from), static_cast<float>(to), fused);
  }

  // A step that leaves an image of this size, or null where that is out of bounds.
  Step* add(Step::Kind kind, int64_t width, int64_t height);
  bool simple(Step::Kind kind) { return add(kind, width_, height_) != nullptr; }

  // resolve.cpp
  bool crop(int64_t x, int64_t y, int64_t width, int64_t height);
  bool resize(int64_t width, int64_t height, double filter);
  bool resize_op(const double* n);
  bool center_crop(int64_t height, int64_t width);
  bool pad(const double* sides, const double* look);
  bool random_crop(const double* n);
  bool random_resized_crop(const Op& op);

  // augment.cpp
  bool adjust(Step::Kind kind, double amount);
  bool affine(const double (&matrix)[6], int64_t width, int64_t height, const Sampling& sampling);
  bool perspective(const double* n);
  bool look_up(const double* tables);
  bool rotate(double angle, bool expand, const double* center, const Sampling& sampling);
  bool operate(Operation operation, double magnitude, int version, const Sampling& sampling);
  double magnitude(Operation operation, double given, const double* scale) const;
  bool color_jitter(const double* n);
  bool random_operation(const double* n);
  bool augment(const double* n);
  bool auto_augment(const double* n);
  bool random_rotation(const double* n);
  bool random_affine(const double* n);
  bool random_erasing(const Op& op);

  int64_t width_, height_;
  Generator& generator_;
  Steps& steps_;
};

}  // namespace stoker
