// Many sessions, batches, cancellations and declined samples at once. Meant to be built with the
// thread sanitizer:
//   cmake -S . -B build-tsan -DSTOKER_BUILD_TOOLS=ON -DSTOKER_SANITIZE=thread && cmake --build
//   build-tsan build-tsan/stoker_stress [seconds]
// Checks besides races: every sample is finished once, equal samples give equal bytes whoever runs
// them, and cancel() returns only when nobody writes any more.
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "engine.hpp"
#include "fuzz/seeds.hpp"

namespace stoker::fuzz {
namespace {

constexpr int kSide = 32, kBatch = 12;
constexpr size_t kSampleBytes = size_t{3} * kSide * kSide;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s\n", what);
  std::abort();
}

// A folder of small JPEGs; every fifth file is none, so that samples are declined.
class Folder {
 public:
  Folder() {
    std::string path = (std::filesystem::temp_directory_path() / "stoker-stress-XXXXXX").string();
    require(::mkdtemp(path.data()) != nullptr, "no temporary folder");
    path_ = path;
    const std::vector<File> seeds = make_seeds(1);
    offsets_.push_back(0);
    for (size_t i = 0; i < seeds.size(); i++) {
      const std::string name = std::to_string(i);
      std::ofstream out(path_ / name, std::ios::binary);
      if (i % 5 == 4)
        out << "not an image";
      else
        out.write(reinterpret_cast<const char*>(seeds[i].data()), std::streamsize(seeds[i].size()));
      names_ += name;
      offsets_.push_back(names_.size());
    }
    const std::string root = path_.string() + "/";
    files.root.assign(root.begin(), root.end());
    files.names = names_.data();
    files.offsets = offsets_.data();
    files.count = int64_t(seeds.size());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  Files files;

 private:
  std::filesystem::path path_;
  std::string names_;
  std::vector<uint64_t> offsets_;
};

// One consumer: its own session, as a loader has, and a thread that plays the part of Pillow.
void consume(Pool& pool, const Plan& plan, const Files& files, uint64_t seed,
             std::chrono::steady_clock::time_point until) {
  Random random(seed);
  while (std::chrono::steady_clock::now() < until) {
    const auto session = pool.open_session(random.between(1, 4));
    std::atomic<bool> stop{false};
    std::thread pillow([&] {
      const std::vector<uint8_t> pixels(size_t{3} * 40 * 50, 7);
      while (!stop.load()) {
        auto declined = pool.take_declined(*session, std::chrono::milliseconds(5));
        if (!declined) continue;
        if (declined->sample % 2 == 0)
          pool.finish_failed(*session, *declined->batch, declined->sample, Status::fallback_failed);
        else
          pool.finish_pixels(*session, *declined->batch, declined->sample, pixels.data(), 150, 40,
                             50);
      }
    });
    std::vector<std::vector<uint8_t>> memory(6, std::vector<uint8_t>(kBatch * kSampleBytes));
    std::vector<std::shared_ptr<Batch>> batches;
    for (auto& out : memory) {
      auto batch = std::make_shared<Batch>();
      batch->plan = &plan;
      batch->files = &files;
      for (int i = 0; i < kBatch; i++) {
        batch->rows.push_back(int64_t(random.below(size_t(files.count))));
        batch->keys.push_back(uint32_t(batch->rows.back()));
      }
      batch->rows[kBatch - 1] = batch->rows[0];
      batch->keys[kBatch - 1] = batch->keys[0];
      batch->out = out.data();
      batch->height = batch->width = kSide;
      batch->sample_bytes = kSampleBytes;
      batch->statuses.assign(kBatch, Status::ok);
      batch->details.assign(kBatch, 0);
      batch->remaining = kBatch;
      batches.push_back(batch);
      pool.submit(session, batch);
    }
    for (size_t i = 0; i < batches.size(); i++) {
      Batch& batch = *batches[i];
      if (random.chance(30)) {
        pool.cancel(*session, batch);
        std::memset(memory[i].data(), 0, memory[i].size());  // a late writer is a race here
      } else {
        while (!pool.wait(*session, batch, std::chrono::milliseconds(100), false)) {
        }
        if (batch.statuses[0] == Status::ok && batch.statuses[kBatch - 1] == Status::ok)
          require(!std::memcmp(batch.out, batch.out + (kBatch - 1) * kSampleBytes, kSampleBytes),
                  "the same sample gave other bytes");
      }
      require(batch.remaining.load() == 0, "samples are left");
    }
    pool.close_session(session);
    stop = true;
    pillow.join();
  }
}

int run(double seconds) {
  const Folder folder;
  Plan plan;
  const double size[] = {kSide, kSide, 0, 0, 0, 0, 0, 0};
  plan.add("center_crop", std::span(size, 2));
  plan.conversion->format = PixelFormat::u8_chw;
  Pool pool(detected_level());
  const auto until = std::chrono::steady_clock::now() +
                     std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
  std::vector<std::thread> consumers;
  for (uint64_t i = 0; i < 3; i++)
    consumers.emplace_back([&, i] { consume(pool, plan, folder.files, i + 1, until); });
  for (std::thread& consumer : consumers) consumer.join();
  require(pool.threads() == 0, "threads are left");
  std::puts("stress: nothing found");
  return 0;
}

}  // namespace
}  // namespace stoker::fuzz

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  return stoker::fuzz::run(seconds > 0 ? seconds : 10);
}
