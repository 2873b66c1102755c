// GCC's own intrinsics initialise "undefined" registers with themselves, and GCC warns about that.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include "jpeg/decode_loop.hpp"
#include "jpeg/entropy_fast.hpp"
#include "jpeg/kernels_avx512.hpp"

namespace stoker::jpeg {
namespace {

struct Kernels : Avx512Pixels {
  using Entropy = FastEntropy;
};

}  // namespace

Status decode_scan_avx512(const Scan& scan) { return decode_scan<Kernels>(scan); }

}  // namespace stoker::jpeg
