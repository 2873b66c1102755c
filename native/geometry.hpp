// A rectangle of pixels, in the coordinates of the image it belongs to.
#pragma once

namespace stoker {

struct Rect {
  int x = 0, y = 0, width = 0, height = 0;
  int right() const { return x + width; }
  int bottom() const { return y + height; }
  bool operator==(const Rect&) const = default;
};

}  // namespace stoker
