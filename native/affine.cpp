#include "affine.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>

#include "affine_kernels.hpp"

namespace stoker {
namespace {

constexpr double kPi = 3.141592653589793;

// Python calls the C library's functions one by one. Through these pointers so do we: a compiler
// may not replace pairs of them by sincos or fold them, which could round otherwise.
double (*volatile const cosine)(double) = std::cos;
double (*volatile const sine)(double) = std::sin;
double (*volatile const tangent)(double) = std::tan;
double (*volatile const arc_tangent)(double) = std::atan;

double radians(double degrees) { return degrees * (kPi / 180.0); }

// Python's round(value, 15).
double round_to_15(double value) {
  char text[64];
  const auto written = std::to_chars(text, text + sizeof text, value, std::chars_format::fixed, 15);
  std::from_chars(text, written.ptr, value);
  return value;
}

struct Point {
  double x, y;
};

Point mapped(const double (&m)[6], double x, double y) {
  return {m[0] * x + m[1] * y + m[2], m[3] * x + m[4] * y + m[5]};
}

// Pillow's conversion of a position to the pixel that holds it; -1 outside on the left or above.
int coordinate(double value) {
  if (!(value >= 0.0)) return -1;
  return value < 2147483647.0 ? static_cast<int>(value) : 2147483647;
}

using Source = AffineSource;

void copy(const Source& source, int x, int y, uint8_t* out) {
  std::memcpy(out, source.holds(x, y) ? source.row(y) + static_cast<ptrdiff_t>(x) * 3 : source.fill,
              4);
}

// Nearest, axes kept: positions are summed up pixel by pixel.
void scale_nearest(const Source& source, const double (&m)[6], const Rect& wanted, uint8_t* out) {
  double y = m[5] + m[4] * 0.5;
  for (int row = 0; row < wanted.bottom(); ++row, y += m[4]) {
    if (row < wanted.y) continue;
    const int from = coordinate(y);
    double x = m[2] + m[0] * 0.5;
    for (int column = 0; column < wanted.right(); ++column, x += m[0]) {
      if (column < wanted.x) continue;
      const int at = coordinate(x);
      copy(source, at, from, out);
      out += 3;
    }
  }
}

bool fits_fixed(const double (&m)[6], int x, int y) {
  return std::fabs(x * m[0] + y * m[1] + m[2]) < 32768.0 &&
         std::fabs(x * m[3] + y * m[4] + m[5]) < 32768.0;
}

// Nearest, in 16.16 fixed point. Sums wrap around.
void fixed_nearest(const Source& source, const double (&m)[6], const Rect& wanted, uint8_t* out) {
  const auto fix = [](double value) {
    return static_cast<uint32_t>(static_cast<int64_t>(std::floor(value * 65536.0 + 0.5)));
  };
  const uint32_t dx = fix(m[0]), dy = fix(m[3]), row_dx = fix(m[1]), row_dy = fix(m[4]);
  const uint32_t first_x = fix(m[2] + m[0] * 0.5 + m[1] * 0.5);
  const uint32_t first_y = fix(m[5] + m[3] * 0.5 + m[4] * 0.5);
  for (int row = wanted.y; row < wanted.bottom(); ++row) {
    const auto down = static_cast<uint32_t>(row), across = static_cast<uint32_t>(wanted.x);
    uint32_t x = first_x + down * row_dx + across * dx;
    uint32_t y = first_y + down * row_dy + across * dy;
    for (int i = 0; i < wanted.width; ++i, out += 3, x += dx, y += dy) {
      const int at = static_cast<int32_t>(x) >> 16, from = static_cast<int32_t>(y) >> 16;
      copy(source, at, from, out);
    }
  }
}

// Nearest, for images beyond fixed point: sums of doubles.
void wide_nearest(const Source& source, const double (&m)[6], const Rect& wanted, uint8_t* out) {
  double row_x = m[2] + m[1] * 0.5 + m[0] * 0.5, row_y = m[5] + m[4] * 0.5 + m[3] * 0.5;
  for (int row = 0; row < wanted.bottom(); ++row, row_x += m[1], row_y += m[4]) {
    if (row < wanted.y) continue;
    double x = row_x, y = row_y;
    for (int column = 0; column < wanted.right(); ++column, x += m[0], y += m[3]) {
      if (column < wanted.x) continue;
      const int at = coordinate(x), from = coordinate(y);
      copy(source, at, from, out);
      out += 3;
    }
  }
}

double between(double a, double b, double share) { return a + (b - a) * share; }

double cubic(double a, double b, double c, double d, double share) {
  const double p2 = -a + c, p3 = 2 * (a - b) + c - d, p4 = -a + b - c + d;
  return b + share * (p2 + share * (p3 + share * p4));
}

// The pixel at a position inside of the image from 2 x 2 (bilinear) or 4 x 4 (bicubic) pixels;
// those outside repeat the edge.
template <int kTaps>
void interpolate(const Source& source, double x, double y, uint8_t* out) {
  x -= 0.5;
  y -= 0.5;
  const double left = std::floor(x), top = std::floor(y);
  const double share_x = x - left, share_y = y - top;
  const int first_x = static_cast<int>(left) - (kTaps / 2 - 1);
  const int first_y = static_cast<int>(top) - (kTaps / 2 - 1);
  ptrdiff_t columns[kTaps];
  const uint8_t* rows[kTaps];
  for (int i = 0; i < kTaps; ++i) {
    columns[i] = static_cast<ptrdiff_t>(std::clamp(first_x + i, 0, source.width - 1)) * 3;
    rows[i] = source.row(std::clamp(first_y + i, 0, source.height - 1));
  }
  for (int c = 0; c < 3; ++c) {
    double lines[kTaps];
    for (int i = 0; i < kTaps; ++i) {
      const uint8_t* row = rows[i] + c;
      if constexpr (kTaps == 2)
        lines[i] = between(row[columns[0]], row[columns[1]], share_x);
      else
        lines[i] =
            cubic(row[columns[0]], row[columns[1]], row[columns[2]], row[columns[3]], share_x);
    }
    if constexpr (kTaps == 2) {
      out[c] = static_cast<uint8_t>(between(lines[0], lines[1], share_y));
    } else {
      const double value = cubic(lines[0], lines[1], lines[2], lines[3], share_y);
      out[c] = value <= 0.0 ? 0 : value >= 255.0 ? 255 : static_cast<uint8_t>(value);
    }
  }
}

template <int kTaps>
void interpolate_row(const Source& source, const double* m, int column, int row, int count,
                     uint8_t* out) {
  const double y = row + 0.5;
  for (int i = 0; i < count; ++i, out += 3) {
    const double x = column + i + 0.5;
    const Point at{m[0] * x + m[1] * y + m[2], m[3] * x + m[4] * y + m[5]};
    if (at.x >= 0.0 && at.x < source.width && at.y >= 0.0 && at.y < source.height)
      interpolate<kTaps>(source, at.x, at.y, out);
    else
      std::memcpy(out, source.fill, 4);
  }
}

Interpolate interpolation(SimdLevel level, Filter filter) {
#if defined(STOKER_X86)
  if (level != SimdLevel::scalar) return filter == Filter::bilinear ? kBilinearAvx2 : kBicubicAvx2;
#endif
  static_cast<void>(level);
  return filter == Filter::bilinear ? interpolate_row<2> : interpolate_row<4>;
}

Source source_of(const View& view, const Step& step) {
  return {view.pixels,
          view.stride,
          view.rect.width,
          view.rect.height,
          {step.fill[0], step.fill[1], step.fill[2], 0}};
}

}  // namespace

double shear_degrees(double magnitude) { return arc_tangent(magnitude) * (180.0 / kPi); }

// The inverse of scale * rotation * shear, moved so that the center maps to itself plus the
// translation. The two versions of torchvision round differently.
void inverse_affine_matrix(const AffineParameters& p, int version, double (&matrix)[6]) {
  const double angle = radians(p.angle), sx = radians(p.shear[0]), sy = radians(p.shear[1]);
  const double cx = p.center[0], cy = p.center[1], tx = p.translate[0], ty = p.translate[1];
  const double a = cosine(angle - sy) / cosine(sy), c = sine(angle - sy) / cosine(sy);
  double b, d;
  if (version == 1) {
    b = -cosine(angle - sy) * tangent(sx) / cosine(sy) - sine(angle);
    d = -sine(angle - sy) * tangent(sx) / cosine(sy) + cosine(angle);
  } else {
    b = -(a * tangent(sx) + sine(angle));
    d = cosine(angle) - c * tangent(sx);
  }
  const double inverse[6] = {d, -b, 0.0, -c, a, 0.0};
  for (int i = 0; i < 6; ++i) matrix[i] = inverse[i] / p.scale;
  if (version == 1) {
    matrix[2] += matrix[0] * (-cx - tx) + matrix[1] * (-cy - ty);
    matrix[5] += matrix[3] * (-cx - tx) + matrix[4] * (-cy - ty);
    matrix[2] += cx;
    matrix[5] += cy;
  } else {
    matrix[2] += cx - matrix[0] * (cx + tx) - matrix[1] * (cy + ty);
    matrix[5] += cy - matrix[3] * (cx + tx) - matrix[4] * (cy + ty);
  }
}

void rotation_matrix(double angle, const double* center, bool expand, int64_t& width,
                     int64_t& height, double (&matrix)[6]) {
  const double turn = -radians(angle);
  const double cos = round_to_15(cosine(turn)), sin = round_to_15(sine(turn));
  const double rotation[6] = {cos, sin, 0.0, round_to_15(-sine(turn)), cos, 0.0};
  std::copy(rotation, rotation + 6, matrix);
  const auto move = [&](double x, double y) {
    const Point to = mapped(matrix, x, y);
    matrix[2] = to.x;
    matrix[5] = to.y;
  };
  move(-center[0], -center[1]);
  matrix[2] += center[0];
  matrix[5] += center[1];
  if (!expand) return;
  const double w = static_cast<double>(width), h = static_cast<double>(height);
  const Point corners[4] = {mapped(matrix, 0, 0), mapped(matrix, w, 0), mapped(matrix, w, h),
                            mapped(matrix, 0, h)};
  Point least = corners[0], greatest = corners[0];
  for (const Point& corner : corners) {
    least = {std::min(least.x, corner.x), std::min(least.y, corner.y)};
    greatest = {std::max(greatest.x, corner.x), std::max(greatest.y, corner.y)};
  }
  const double new_width = std::ceil(greatest.x) - std::floor(least.x);
  const double new_height = std::ceil(greatest.y) - std::floor(least.y);
  move(-(new_width - w) / 2.0, -(new_height - h) / 2.0);
  width = static_cast<int64_t>(new_width);
  height = static_cast<int64_t>(new_height);
}

void apply_perspective(const View& view, const Step& step, const Rect& wanted, uint8_t* out) {
  const Source source = source_of(view, step);
  const double* m = step.matrix;
  const auto inside = [&](const Point& at) {
    return at.x >= 0.0 && at.x < source.width && at.y >= 0.0 && at.y < source.height;
  };
  for (int row = wanted.y; row < wanted.bottom(); ++row) {
    const double y = row + 0.5;
    for (int column = wanted.x; column < wanted.right(); ++column, out += 3) {
      const double x = column + 0.5, divisor = m[6] * x + m[7] * y + 1;
      const Point at{(m[0] * x + m[1] * y + m[2]) / divisor,
                     (m[3] * x + m[4] * y + m[5]) / divisor};
      if (!inside(at))
        std::memcpy(out, source.fill, 4);
      else if (step.filter == Filter::nearest)
        copy(source, coordinate(at.x), coordinate(at.y), out);
      else if (step.filter == Filter::bilinear)
        interpolate<2>(source, at.x, at.y, out);
      else
        interpolate<4>(source, at.x, at.y, out);
    }
  }
}

void apply_affine(SimdLevel level, const View& view, const Step& step, const Rect& wanted,
                  uint8_t* out) {
  const Source source = source_of(view, step);
  const double m[6] = {step.matrix[0], step.matrix[1], step.matrix[2],
                       step.matrix[3], step.matrix[4], step.matrix[5]};
  if (step.filter != Filter::nearest) {
    const Interpolate row = interpolation(level, step.filter);
    for (int y = wanted.y; y < wanted.bottom();
         ++y, out += static_cast<ptrdiff_t>(wanted.width) * 3)
      row(source, m, wanted.x, y, wanted.width, out);
  } else if (m[1] == 0 && m[3] == 0) {
    scale_nearest(source, m, wanted, out);
  } else if (fits_fixed(m, 0, 0) && fits_fixed(m, step.width, step.height) &&
             fits_fixed(m, 0, step.height) && fits_fixed(m, step.width, 0)) {
    fixed_nearest(source, m, wanted, out);
  } else {
    wide_nearest(source, m, wanted, out);
  }
}

}  // namespace stoker
