#include "random.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>

namespace stoker {
namespace {

constexpr int kWords = 624;
constexpr int kShift = 397;

float scale(uint32_t draw, float from, float to, bool fused) {
  const float unit = static_cast<float>(draw) * 0x1p-24f;
  const float span = to - from;
  // The build forbids contraction, so these are one rounding or two as written.
  return fused ? std::fma(unit, span, from) : unit * span + from;
}

// e^x for |x| < 700, to 2e-11 of its value: x = n ln 2 + r, Taylor series in r. Without calls and
// branches, so that compilers vectorise the loop over 2^24 draws; the same operations in the same
// order give the same bits with and without.
inline double exponential(double x) {
  constexpr double kRound = 0x1.8p52;  // adding and subtracting it rounds to an integer
  const double shifted = x * 0x1.71547652b82fep0 + kRound;
  const double n = shifted - kRound;
  const double r = x - n * 0x1.62e42fefa39efp-1;
  double sum = 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  // The low bits of `shifted` hold n as an integer; moved into the exponent they make 2^n.
  const uint64_t exponent = (std::bit_cast<uint64_t>(shifted) + 1023) << 52;
  return sum * std::bit_cast<double>(exponent);
}

}  // namespace

void Generator::seed(uint32_t seed) {
  state_[0] = seed;
  seeded_ = 1;
  position_ = 0;
  drawn_ = 0;
}

void Generator::seed_up_to(int count) {
  uint32_t word = state_[seeded_ - 1];
  for (int i = seeded_; i < count; ++i) {
    word = 1812433253u * (word ^ (word >> 30)) + static_cast<uint32_t>(i);
    state_[i] = word;
  }
  seeded_ = count;
}

uint32_t Generator::next() {
  const int i = position_;
  const int following = i + 1 < kWords ? i + 1 : 0;
  const int far = i + kShift < kWords ? i + kShift : i + kShift - kWords;
  const int needed = std::max(far, following) + 1;
  // Seeds are only ever needed ahead of the words already replaced; a few more than asked for cost
  // less than the call.
  if (needed > seeded_) seed_up_to(std::min(needed + 16, kWords));
  const uint32_t joined = (state_[i] & 0x80000000u) | (state_[following] & 0x7fffffffu);
  uint32_t word = state_[far] ^ (joined >> 1) ^ ((joined & 1u) ? 0x9908b0dfu : 0u);
  state_[i] = word;
  position_ = following;
  ++drawn_;
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680u;
  word ^= (word << 15) & 0xefc60000u;
  return word ^ (word >> 18);
}

float Generator::uniform() { return static_cast<float>(next() & 0xffffffu) * 0x1p-24f; }

float Generator::uniform(float from, float to, bool fused) {
  return scale(next() & 0xffffffu, from, to, fused);
}

int64_t Generator::below(int64_t bound) { return next() % static_cast<uint32_t>(bound); }

ExpTable::ExpTable(float low, float high, bool fused) : low_(low), high_(high), fused_(fused) {
  starts_.assign((kDraws >> kBucketBits) + 1, 0);
}

float ExpTable::argument(uint32_t draw) const { return scale(draw, low_, high_, fused_); }

void ExpTable::arguments(uint32_t first, float* out, size_t count) const {
  const int start = static_cast<int>(first), size = static_cast<int>(count);
  if (!fused_) {
    for (int i = 0; i < size; ++i) out[i] = argument(first + static_cast<uint32_t>(i));
    return;
  }
  // Without a call of fma per draw: the product of two 24-bit numbers is exact in double, so only
  // the sum can be rounded twice, and that differs from once only where the double lies halfway
  // between two floats.
  const double span = static_cast<double>(high_ - low_) * 0x1p-24, from = low_;
  constexpr int kBlock = 256;
  for (int block = 0; block < size; block += kBlock) {
    const int end = std::min(block + kBlock, size);
    int halfway = 0;
    for (int i = block; i < end; ++i) {
      const double sum = static_cast<double>(start + i) * span + from;
      out[i] = static_cast<float>(sum);
      const auto low_word = static_cast<uint32_t>(std::bit_cast<uint64_t>(sum));
      halfway += (low_word & 0x1fffffffu) == 0x10000000u ? 1 : 0;
    }
    if (halfway == 0) continue;
    for (int i = block; i < end; ++i) out[i] = argument(first + static_cast<uint32_t>(i));
  }
}

bool ExpTable::check(uint32_t first, const float* arguments, const float* values, size_t count) {
  if (first != checked_ || count > kDraws - first) good_ = false;
  constexpr size_t kBlock = 256;
  float ours[kBlock];
  for (size_t done = 0; good_ && done < count; done += kBlock) {
    const uint32_t draw = first + static_cast<uint32_t>(done);
    const size_t size = std::min(kBlock, count - done);
    for (size_t i = 0; i < size; ++i)
      ours[i] = static_cast<float>(exponential(arguments[done + i]));
    if (std::memcmp(ours, values + done, size * sizeof(float)) == 0) continue;
    for (size_t i = 0; i < size; ++i) {
      if (ours[i] == values[done + i]) continue;
      const int64_t distance =
          int64_t{std::bit_cast<int32_t>(values[done + i])} - std::bit_cast<int32_t>(ours[i]);
      if ((distance != 1 && distance != -1) || exceptions_.size() >= kDraws / 8) {
        good_ = false;
        break;
      }
      const uint32_t here = draw + static_cast<uint32_t>(i);
      ++starts_[(here >> kBucketBits) + 1];
      exceptions_.push_back(static_cast<uint16_t>((here & ((1u << kBucketBits) - 1)) |
                                                  (distance < 0 ? 0x8000u : 0u)));
    }
  }
  checked_ = first + static_cast<uint32_t>(count);
  if (checked_ == kDraws) {
    for (size_t i = 1; i < starts_.size(); ++i) starts_[i] += starts_[i - 1];
    exceptions_.shrink_to_fit();
  }
  return good_;
}

float ExpTable::value(uint32_t draw) const {
  const float ours = static_cast<float>(exponential(argument(draw)));
  const uint32_t bucket = draw >> kBucketBits;
  const uint16_t low = static_cast<uint16_t>(draw & ((1u << kBucketBits) - 1));
  const auto end = exceptions_.begin() + starts_[bucket + 1];
  const auto found =
      std::lower_bound(exceptions_.begin() + starts_[bucket], end, low,
                       [](uint16_t entry, uint16_t wanted) { return (entry & 0x7fffu) < wanted; });
  if (found == end || (*found & 0x7fffu) != low) return ours;
  return std::bit_cast<float>(std::bit_cast<int32_t>(ours) + ((*found & 0x8000u) ? -1 : 1));
}

namespace {

struct Tables {
  std::mutex mutex;
  std::vector<std::shared_ptr<const ExpTable>> all;
};

// Never destroyed: threads may still run plans while the process ends.
Tables& tables() {
  static Tables* const instance = new Tables;
  return *instance;
}

}  // namespace

bool publish(std::shared_ptr<const ExpTable> table) {
  if (!table || !table->proven()) return false;
  Tables& shared = tables();
  const std::lock_guard lock(shared.mutex);
  shared.all.push_back(std::move(table));
  return true;
}

std::shared_ptr<const ExpTable> find_exp_table(float low, float high, bool fused) {
  Tables& shared = tables();
  const std::lock_guard lock(shared.mutex);
  for (const auto& table : shared.all) {
    if (table->low() == low && table->high() == high && table->fused() == fused) return table;
  }
  return nullptr;
}

}  // namespace stoker
