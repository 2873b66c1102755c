// Affine transforms as torchvision and Pillow compute them: matrices, and pixels.
#pragma once

#include <cstdint>

#include "pixels.hpp"
#include "plan.hpp"
#include "simd.hpp"

namespace stoker {

// The parameters of torchvision's functional.affine: degrees, pixels.
struct AffineParameters {
  double angle = 0, scale = 1;
  double center[2] = {0, 0}, translate[2] = {0, 0}, shear[2] = {0, 0};
};

// Step::matrix of functional.affine of torchvision.transforms (version 1) or its v2.
void inverse_affine_matrix(const AffineParameters& parameters, int version, double (&matrix)[6]);

// Step::matrix of Pillow's Image.rotate for an angle in [0, 360); with `expand`, width and height
// become those of the result.
void rotation_matrix(double angle, const double* center, bool expand, int64_t& width,
                     int64_t& height, double (&matrix)[6]);

// The angle whose tangent is `magnitude`, in degrees.
double shear_degrees(double magnitude);

// Fills `wanted` of the image after an affine step, dense rows, from the whole image before it, as
// Pillow's Image.transform does. A byte past the last row is readable in source, writable in out.
void apply_affine(SimdLevel level, const View& source, const Step& step, const Rect& wanted,
                  uint8_t* out);

// The same after a perspective step.
void apply_perspective(const View& source, const Step& step, const Rect& wanted, uint8_t* out);

}  // namespace stoker
