#include "colour_rows.hpp"

namespace stoker {

const ColourKernels kColourScalar = kKernels;

}  // namespace stoker
