#include "jpeg/decode_loop.hpp"
#include "jpeg/entropy_fast.hpp"
#include "jpeg/kernels_avx2.hpp"

namespace stoker::jpeg {
namespace {

struct Kernels : Avx2Pixels {
  using Entropy = FastEntropy;
};

}  // namespace

Status decode_scan_avx512(const Scan& scan) { return decode_scan<Kernels>(scan); }

}  // namespace stoker::jpeg
