// torch's CPU generator, as far as stock transforms draw from it, and torch.exp of what it draws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace stoker {

// mt19937 as torch seeds and reads it: torch.default_generator.manual_seed(seed) with a 32-bit
// seed. A sample draws a handful of numbers, so the state is seeded and twisted word by word, as
// far as they need it.
class Generator {
 public:
  void seed(uint32_t seed);
  uint32_t next();
  // torch.rand(1): 24 random bits / 2^24.
  float uniform();
  // torch.empty(1).uniform_(from, to). fused: torch's kernel multiplies and adds with one rounding
  // (that depends on the instruction set it runs with; Python finds out which).
  float uniform(float from, float to, bool fused);
  // torch.randint(0, bound, (1,)), 0 < bound <= 2^28 (above, torch draws 64 bits).
  int64_t below(int64_t bound);
  // Words drawn since seed().
  int64_t drawn() const { return drawn_; }

 private:
  void seed_up_to(int count);

  uint32_t state_[624];
  int seeded_ = 0;    // words of state_ that hold their seed or a later value
  int position_ = 0;  // the word that next() replaces and returns
  int64_t drawn_ = 0;
};

// torch.exp(torch.empty(1).uniform_(low, high)) for each of the 2^24 numbers that uniform_ can
// draw.
//
// Note [Proven exponentials]
// torch.exp is within one unit in the last place of the exact value, but which neighbour it
// returns depends on the library and the instruction set that torch was built with and runs on. So
// ours is the correctly rounded value (nearly: the double before the rounding has an error of its
// own, which changes nothing here), Python feeds torch's answers for all 2^24 arguments through
// check() once, and the draws where torch differs are kept: 1 % with Intel's MKL, two bytes each.
class ExpTable {
 public:
  ExpTable(float low, float high, bool fused);

  float low() const { return low_; }
  float high() const { return high_; }
  bool fused() const { return fused_; }
  // uniform_'s result for draw, draw + 1, ... below 2^24, to be handed to torch.exp.
  void arguments(uint32_t first, float* out, size_t count) const;
  // Compares torch.exp of these arguments. Ranges must follow one another from 0 to 2^24.
  // False, for good, where a value is not ours or its neighbour, or where too many differ.
  bool check(uint32_t first, const float* arguments, const float* values, size_t count);
  // True once all 2^24 values have passed.
  bool proven() const { return good_ && checked_ == kDraws; }
  size_t exceptions() const { return exceptions_.size(); }
  // torch.exp for these 24 bits. Call it on a proven table only.
  float value(uint32_t draw) const;

  static constexpr uint32_t kDraws = 1u << 24;

 private:
  static constexpr uint32_t kBucketBits = 12;

  float argument(uint32_t draw) const;

  float low_, high_;
  bool fused_;
  bool good_ = true;
  uint32_t checked_ = 0;
  std::vector<uint32_t> starts_;      // of the exceptions of draws [b << 12, (b + 1) << 12)
  std::vector<uint16_t> exceptions_;  // low 12 bits of the draw; bit 15: one below ours, else above
};

// Tables are shared by all plans of the process. publish() refuses one that is not proven.
bool publish(std::shared_ptr<const ExpTable> table);
std::shared_ptr<const ExpTable> find_exp_table(float low, float high, bool fused);

}  // namespace stoker
