#include "simd.hpp"

namespace stoker {

SimdLevel detected_level() {
#if defined(STOKER_X86)
  static const SimdLevel level = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") &&
                      __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                      __builtin_cpu_supports("movbe");
    if (!avx2) return SimdLevel::scalar;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vbmi") &&
                        __builtin_cpu_supports("avx512vnni");
    return avx512 ? SimdLevel::avx512 : SimdLevel::avx2;
  }();
  return level;
#else
  return SimdLevel::scalar;
#endif
}

const char* name(SimdLevel level) {
  switch (level) {
    case SimdLevel::avx512: return "avx512";
    case SimdLevel::avx2: return "avx2";
    default: return "scalar";
  }
}

}  // namespace stoker
