// Colours, rotations and augmentation policies: what torchvision draws and computes from it.
#include <algorithm>
#include <cmath>

#include "affine.hpp"
#include "resolver.hpp"

namespace stoker {
namespace {

// Up to here Python compares the translations of policies with torch's.
constexpr int64_t kComparedSizes = 8192;

// torch.linspace(0, most, bins)[index] for numbers of float32, as its scalar loop computes it.
float linspace(double most, int bins, int index) {
  const float end = static_cast<float>(most);
  const float step = end / static_cast<float>(bins - 1);
  return index < bins / 2 ? step * static_cast<float>(index)
                          : end - step * static_cast<float>(bins - index - 1);
}

}  // namespace

Sampling sampling_of(const double* n) {
  Sampling sampling;
  sampling.filter = static_cast<Filter>(static_cast<int>(n[0]));
  for (int c = 0; c < 3; ++c) sampling.fill[c] = static_cast<uint8_t>(n[1 + c]);
  return sampling;
}

bool Resolver::adjust(Step::Kind kind, double amount) {
  Step* step = add(kind, width_, height_);
  if (step) step->amount = amount;
  return step != nullptr;
}

bool Resolver::affine(const double (&matrix)[6], int64_t width, int64_t height,
                      const Sampling& sampling) {
  constexpr double kIdentity[6] = {1, 0, 0, 0, 1, 0};
  if (std::equal(matrix, matrix + 6, kIdentity) && width == width_ && height == height_)
    return true;
  // Far beyond every image; Pillow's conversions to int would overflow.
  for (const double m : matrix)
    if (!(std::fabs(m) < 1e6)) return false;
  Step* step = add(Step::Kind::affine, width, height);
  if (!step) return false;
  std::copy(matrix, matrix + 6, step->matrix);
  step->filter = sampling.filter;
  std::copy(sampling.fill, sampling.fill + 3, step->fill);
  return true;
}

bool Resolver::perspective(const double* n) {
  const double* m = n + 2;
  const double width = n[0], height = n[1];
  for (int i = 0; i < 8; ++i)
    if (!(std::fabs(m[i]) < 1e6)) return false;
  // Never through infinity: the divisor is greatest and least in the corners.
  for (const double x : {0.0, width})
    for (const double y : {0.0, height})
      if (!(m[6] * x + m[7] * y + 1 > 1e-6)) return false;
  Step* step = add(Step::Kind::perspective, integer(width), integer(height));
  if (!step) return false;
  std::copy(m, m + 8, step->matrix);
  const Sampling sampling = sampling_of(n + 10);
  step->filter = sampling.filter;
  std::copy(sampling.fill, sampling.fill + 3, step->fill);
  return true;
}

bool Resolver::look_up(const double* tables) {
  Step* step = add(Step::Kind::look_up, width_, height_);
  if (step) step->tables = tables;
  return step != nullptr;
}

// Image.rotate. center: x, y, or null for the middle.
bool Resolver::rotate(double angle, bool expand, const double* center, const Sampling& sampling) {
  angle = std::fmod(angle, 360.0);
  if (angle < 0) angle += 360.0;
  const double w = static_cast<double>(width_), h = static_cast<double>(height_);
  if (!center) {
    if (angle == 0) return true;
    if (angle == 180) return simple(Step::Kind::flip_x) && simple(Step::Kind::flip_y);
    if ((angle == 90 || angle == 270) && (expand || width_ == height_)) {
      const Sampling exact;
      if (angle == 90) return affine({0, -1, w, 1, 0, 0}, height_, width_, exact);
      return affine({0, 1, 0, -1, 0, h}, height_, width_, exact);
    }
  }
  const double middle[2] = {w / 2, h / 2};
  double matrix[6];
  int64_t width = width_, height = height_;
  rotation_matrix(angle, center ? center : middle, expand, width, height, matrix);
  return affine(matrix, width, height, sampling);
}

bool Resolver::operate(Operation operation, double magnitude, int version,
                       const Sampling& sampling) {
  const auto enhance = [&](Step::Kind kind) {
    // A factor of 1 gives a copy.
    return static_cast<float>(1.0 + magnitude) == 1.0f || adjust(kind, 1.0 + magnitude);
  };
  AffineParameters parameters;
  switch (operation) {
    case Operation::identity: return true;
    case Operation::shear_x:
    case Operation::shear_y:
      parameters.shear[operation == Operation::shear_y] = shear_degrees(magnitude);
      break;
    case Operation::translate_x:
    case Operation::translate_y:
      parameters.center[0] = static_cast<double>(width_) * 0.5;
      parameters.center[1] = static_cast<double>(height_) * 0.5;
      parameters.translate[operation == Operation::translate_y] = std::trunc(magnitude);
      break;
    case Operation::rotate: return rotate(magnitude, false, nullptr, sampling);
    case Operation::brightness: return enhance(Step::Kind::brightness);
    case Operation::saturation: return enhance(Step::Kind::saturation);
    case Operation::contrast: return enhance(Step::Kind::contrast);
    case Operation::sharpness: return enhance(Step::Kind::sharpness);
    case Operation::posterize:
      return magnitude == 8 || adjust(Step::Kind::posterize, std::trunc(magnitude));
    case Operation::solarize: return adjust(Step::Kind::solarize, magnitude);
    case Operation::auto_contrast: return simple(Step::Kind::auto_contrast);
    case Operation::equalize: return simple(Step::Kind::equalize);
    case Operation::invert: return simple(Step::Kind::invert);
  }
  double matrix[6];
  inverse_affine_matrix(parameters, version, matrix);
  return affine(matrix, width_, height_, sampling);
}

// NaN stands for the share of the size that a policy translates by, and remains where no one has
// compared it with torch's; scale: bins, index.
double Resolver::magnitude(Operation operation, double given, const double* scale) const {
  if (!std::isnan(given)) return given;
  const int64_t size = operation == Operation::translate_x ? width_ : height_;
  if (size > kComparedSizes) return given;
  return linspace(150.0 / 331.0 * static_cast<double>(size), static_cast<int>(scale[0]),
                  static_cast<int>(scale[1]));
}

bool Resolver::color_jitter(const double* n) {
  int order[4] = {0, 1, 2, 3};  // torch.randperm(4)
  for (int i = 0; i < 3; ++i) std::swap(order[i], order[i + generator_.below(4 - i)]);
  double factors[4] = {};
  for (int i = 0; i < 4; ++i)
    if (n[3 * i] != 0) factors[i] = uniform(n[3 * i + 1], n[3 * i + 2], n[12] != 0);
  constexpr Step::Kind kKinds[] = {Step::Kind::brightness, Step::Kind::contrast,
                                   Step::Kind::saturation, Step::Kind::hue};
  for (const int i : order) {
    if (n[3 * i] == 0) continue;
    const double amount = i == 3 ? std::trunc(factors[i] * 255) : factors[i];
    if (!adjust(kKinds[i], amount)) return false;
  }
  return true;
}

bool Resolver::random_operation(const double* n) {
  // torchvision compares tensors (in float32) or Python's floats.
  const bool done = n[1] == 0 ? happens(n[0]) : double{generator_.uniform()} < n[0];
  if (!done) return true;
  const auto operation = static_cast<Operation>(static_cast<int>(n[2]));
  // Its factor itself, where policies have a magnitude to be added to 1.
  if (operation == Operation::sharpness) return adjust(Step::Kind::sharpness, n[3]);
  return operate(operation, n[3], 1, {});
}

bool Resolver::augment(const double* n) {
  const bool second = n[0] == 2, drawn = n[6] != 0;
  const Sampling sampling = sampling_of(n + 2);
  const int64_t count = integer(n[9]), entries = integer(n[10]);
  for (int64_t round = 0; round < integer(n[1]); ++round) {
    // operation, signed, graded, magnitudes
    const double* entry = n + 11 + generator_.below(entries) * (3 + count);
    const auto operation = static_cast<Operation>(static_cast<int>(entry[0]));
    double value = 0;
    if (entry[2] != 0) {
      const int64_t index = drawn ? generator_.below(count) : 0;
      value = magnitude(operation, entry[3 + index], n + 7);
    }
    if (entry[1] != 0) {
      const bool negative = second ? generator_.uniform() <= 0.5f : generator_.below(2) != 0;
      if (negative) value = -value;
    }
    if (!operate(operation, value, second ? 2 : 1, sampling)) return false;
  }
  return true;
}

bool Resolver::auto_augment(const double* n) {
  const bool second = n[0] == 2;
  const Sampling sampling = sampling_of(n + 1);
  // two of: operation, probability, signed, magnitude, its index
  const double* entry = n + 7 + generator_.below(integer(n[6])) * 10;
  float shares[2] = {};
  bool negative[2] = {};
  if (!second) {
    for (float& share : shares) share = generator_.uniform();
    for (bool& sign : negative) sign = generator_.below(2) == 0;
  }
  for (int i = 0; i < 2; ++i, entry += 5) {
    const float share = second ? generator_.uniform() : shares[i];
    if (!(share <= static_cast<float>(entry[1]))) continue;
    const auto operation = static_cast<Operation>(static_cast<int>(entry[0]));
    const double scale[2] = {n[5], entry[4]};
    double value = magnitude(operation, entry[3], scale);
    if (entry[2] != 0 && (second ? generator_.uniform() <= 0.5f : negative[i])) value = -value;
    if (!operate(operation, value, second ? 2 : 1, sampling)) return false;
  }
  return true;
}

bool Resolver::random_rotation(const double* n) {
  const double angle = uniform(n[0], n[1], n[2] != 0);
  return rotate(angle, n[3] != 0, n[4] != 0 ? n + 5 : nullptr, sampling_of(n + 7));
}

bool Resolver::random_affine(const double* n) {
  const bool fused = n[20] != 0;
  AffineParameters parameters;
  parameters.angle = uniform(n[0], n[1], fused);
  if (n[2] != 0) {
    const double sides[2] = {static_cast<double>(width_), static_cast<double>(height_)};
    for (int i = 0; i < 2; ++i) {
      const double most = n[3 + i] * sides[i];
      parameters.translate[i] = std::nearbyint(double{uniform(-most, most, fused)});
    }
  }
  if (n[5] != 0) parameters.scale = uniform(n[6], n[7], fused);
  for (int i = 0; i < 2; ++i)
    if (n[8] > 2 * i) parameters.shear[i] = uniform(n[9 + 2 * i], n[10 + 2 * i], fused);
  parameters.center[0] = n[13] != 0 ? n[14] : static_cast<double>(width_) * 0.5;
  parameters.center[1] = n[13] != 0 ? n[15] : static_cast<double>(height_) * 0.5;
  if (!(parameters.scale > 0)) return false;
  double matrix[6];
  inverse_affine_matrix(parameters, static_cast<int>(n[21]), matrix);
  return affine(matrix, width_, height_, sampling_of(n + 16));
}

bool Resolver::random_erasing(const Op& op) {
  const double* n = op.numbers.data();
  if (!happens(n[0])) return true;
  const bool fused = n[5] != 0;
  const double area = static_cast<double>(width_ * height_);
  for (int attempt = 0; attempt < 10; ++attempt) {
    const double target = area * uniform(n[1], n[2], fused);
    const double aspect = op.exponentials->value(generator_.next() & 0xffffffu);
    const double h = std::nearbyint(std::sqrt(target * aspect));
    const double w = std::nearbyint(std::sqrt(target / aspect));
    if (!(h < static_cast<double>(height_) && w < static_cast<double>(width_))) continue;
    const int64_t y = generator_.below(height_ - integer(h) + 1);
    const int64_t x = generator_.below(width_ - integer(w) + 1);
    if (w < 1 || h < 1) return true;
    Step* step = add(Step::Kind::erase, width_, height_);
    if (!step) return false;
    step->x = static_cast<int>(x);
    step->y = static_cast<int>(y);
    step->erased_width = static_cast<int>(w);
    step->erased_height = static_cast<int>(h);
    step->erasure = op.erasure;
    return true;
  }
  return true;
}

}  // namespace stoker
