#include "colour_rows.hpp"

namespace stoker {

const ColourKernels kColourAvx2 = kKernels;

}  // namespace stoker
