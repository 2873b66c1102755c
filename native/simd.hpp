// Which instruction set the kernels use. Every level gives the same bytes; tests iterate over
// levels().
#pragma once

namespace stoker {

enum class SimdLevel { scalar = 0, avx2 = 1, avx512 = 2 };

// The highest level that this build holds and this processor runs.
// avx2 means AVX2 + BMI2 + FMA + F16C + MOVBE; avx512 means F, BW, DQ, VL, VBMI and VNNI on top.
SimdLevel detected_level();

const char* name(SimdLevel level);

}  // namespace stoker
