// torch's CPU generator, as far as stock transforms draw from it.
#pragma once

#include <cstdint>

namespace stoker {

// mt19937 as torch seeds and reads it: torch.default_generator.manual_seed(seed) with a 32-bit seed.
class Generator {
 public:
  void seed(uint32_t seed);
  uint32_t next();
  // torch.rand(1): 24 random bits / 2^24.
  float uniform();
  // torch.empty(1).uniform_(from, to)
  float uniform(float from, float to);
  // torch.randint(0, bound, (1,)), 0 < bound < 2^32
  int64_t below(int64_t bound);

 private:
  uint32_t state_[624];
  int position_ = 624;
};

}  // namespace stoker
