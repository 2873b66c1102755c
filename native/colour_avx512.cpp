#include "colour_rows.hpp"

namespace stoker {

const ColourKernels kColourAvx512 = kKernels;

}  // namespace stoker
