// Feeds broken files to the native code and checks what must hold for any input. Meant to be built
// with sanitizers:
//   cmake -S . -B build-fuzz -DSTOKER_BUILD_TOOLS=ON -DSTOKER_SANITIZE=address,undefined && cmake
//   --build build-fuzz build-fuzz/stoker_fuzz --seconds 60 [folder of files ...]
// Iteration i of a run depends on the seed, on i and on the corpus only: --first i --iterations 1
// repeats it.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "execute.hpp"
#include "fuzz/seeds.hpp"

namespace stoker::fuzz {
namespace {

// ---- mutations

class Corpus {
 public:
  explicit Corpus(uint64_t seed) : files_(make_seeds(seed)) {}

  // Adds the files of a folder and its subfolders, up to a size that keeps iterations short.
  void add(const std::filesystem::path& folder) {
    constexpr size_t kMaxBytes = 128 * 1024;
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
      if (entry.is_regular_file() && entry.file_size() <= kMaxBytes) paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    for (const auto& path : paths) {
      std::ifstream in(path, std::ios::binary);
      files_.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    }
  }

  size_t size() const { return files_.size(); }
  const File& pick(Random& random) const { return files_[random.below(files_.size())]; }

 private:
  std::vector<File> files_;
};

// Where the segments of a file begin, as far as they are in order; the last is where the
// entropy-coded data begins.
std::vector<size_t> segment_starts(const File& file) {
  std::vector<size_t> starts;
  size_t at = 2;
  while (at + 4 <= file.size() && file[at] == 0xFF) {
    starts.push_back(at);
    const bool last = file[at + 1] == 0xDA;
    at += 2 + size_t(file[at + 2] << 8 | file[at + 3]);
    if (last) break;
  }
  if (at < file.size()) starts.push_back(at);
  return starts;
}

void mutate_once(File& file, const Corpus& corpus, Random& random) {
  if (file.size() < 4) {
    file.push_back(uint8_t(random.next()));
    return;
  }
  const std::vector<size_t> starts = segment_starts(file);
  const size_t scan = starts.empty() ? file.size() / 2 : starts.back();
  // Headers are short, so that a uniform position would rarely hit them.
  const size_t at = random.chance(50) ? random.below(std::min(scan + 16, file.size()))
                                      : random.below(file.size());
  constexpr uint8_t kTelling[] = {0x00, 0xFF, 0x01, 0x11, 0x22, 0x7F, 0x80, 0xC0,
                                  0xC4, 0xD0, 0xD7, 0xD8, 0xD9, 0xDA, 0xDB};
  switch (random.below(11)) {
    case 0:
    case 1:
    case 2: file[at] ^= uint8_t(1u << random.below(8)); break;
    case 3: file[at] = uint8_t(random.next()); break;
    case 4: file[at] = kTelling[random.below(std::size(kTelling))]; break;
    case 5: file.resize(at); break;
    case 6: {  // remove some
      const size_t count = std::min(1 + random.below(8), file.size() - at);
      file.erase(file.begin() + ptrdiff_t(at), file.begin() + ptrdiff_t(at + count));
      break;
    }
    case 7: {  // insert some, often a marker
      File bytes{0xFF, kTelling[random.below(std::size(kTelling))]};
      if (random.chance(50))
        for (uint8_t& byte : bytes) byte = uint8_t(random.next());
      file.insert(file.begin() + ptrdiff_t(at), bytes.begin(), bytes.end());
      break;
    }
    case 8: {  // a segment lies about its length
      if (starts.size() < 2) break;
      const size_t start = starts[random.below(starts.size() - 1)];
      file[start + 2 + random.below(2)] = uint8_t(random.next());
      break;
    }
    case 9: {  // a segment again, somewhere
      if (starts.size() < 2) break;
      const size_t from = random.below(starts.size() - 1);
      const size_t end = std::min(starts[from + 1], file.size());
      const File copy(file.begin() + ptrdiff_t(starts[from]), file.begin() + ptrdiff_t(end));
      const size_t to = random.chance(80) ? starts[random.below(starts.size())] : at;
      file.insert(file.begin() + ptrdiff_t(std::min(to, file.size())), copy.begin(), copy.end());
      break;
    }
    default: {  // the rest of another file
      const File& other = corpus.pick(random);
      if (other.empty()) break;
      file.resize(at);
      file.insert(file.end(), other.begin() + ptrdiff_t(random.below(other.size())), other.end());
      break;
    }
  }
}

File mutated(const Corpus& corpus, Random& random) {
  File file = corpus.pick(random);
  const int count = random.chance(3)    ? 0
                    : random.chance(60) ? random.between(1, 2)
                                        : random.between(3, 10);
  for (int i = 0; i < count; i++) mutate_once(file, corpus, random);
  return file;
}

// ---- failures keep the input, whoever notices them

uint64_t current_iteration = 0;
const File* current_file = nullptr;

void keep_input() {
  if (!current_file) return;
  const std::string path = "fuzz-" + std::to_string(current_iteration) + ".bin";
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(current_file->data()),
             std::streamsize(current_file->size()));
  std::fprintf(stderr, "in iteration %llu; the input is in %s\n",
               static_cast<unsigned long long>(current_iteration),
               std::filesystem::absolute(path).c_str());
}

}  // namespace
}  // namespace stoker::fuzz

// In a sanitizer's run-time library; absent in other builds.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace stoker::fuzz {
namespace {

// ---- targets: each gets the bytes of one file and aborts if something doesn't hold

#define STOKER_CHECK(condition) check(condition, #condition, __LINE__)

void check(bool holds, const char* condition, int line) {
  if (holds) return;
  std::fprintf(stderr, "check failed in line %d: %s\n", line, condition);
  keep_input();
  std::abort();
}

// Pixels of one decode, between guard bytes.
class Canvas {
 public:
  Canvas(const Rect& region, ptrdiff_t stride)
      : region_(region),
        stride_(stride),
        bytes_(2 * kGuard + size_t(stride) * size_t(region.height) + kRowSlack, kFill) {}

  uint8_t* pixels() { return bytes_.data() + kGuard; }
  const uint8_t* row(int y) const { return bytes_.data() + kGuard + y * stride_; }
  bool guards_intact() const {
    const auto intact = [](uint8_t byte) { return byte == kFill; };
    return std::all_of(bytes_.begin(), bytes_.begin() + kGuard, intact) &&
           std::all_of(bytes_.end() - kGuard, bytes_.end(), intact);
  }
  // Equal to the part of `other` that starts at (x, y).
  bool equals(const Canvas& other, int x, int y) const {
    for (int i = 0; i < region_.height; i++)
      if (std::memcmp(row(i), other.row(y + i) + 3 * x, size_t(region_.width) * 3)) return false;
    return true;
  }

 private:
  static constexpr ptrdiff_t kGuard = 64;
  static constexpr uint8_t kFill = 0xA5;
  Rect region_;
  ptrdiff_t stride_;
  std::vector<uint8_t> bytes_;
};

// Levels agree on status and bytes, a region is the crop of the whole image, and nothing is written
// outside.
void check_decoder(const uint8_t* data, size_t size, Random& random) {
  static std::vector<jpeg::Decoder> decoders = [] {
    std::vector<jpeg::Decoder> all;
    for (int level = 0; level <= int(detected_level()); level++) all.emplace_back(SimdLevel(level));
    return all;
  }();
  jpeg::Limits limits;
  limits.max_pixels = int64_t{1} << random.between(14, 19);
  limits.upright = random.chance(30);
  const Status opened = decoders[0].open(data, size, limits);
  for (jpeg::Decoder& decoder : decoders) STOKER_CHECK(decoder.open(data, size, limits) == opened);
  if (opened != Status::ok) return;
  const jpeg::Header header = decoders[0].header();
  for (jpeg::Decoder& decoder : decoders)
    STOKER_CHECK(decoder.header().width == header.width &&
                 decoder.header().height == header.height && decoder.header().gray == header.gray);

  const auto decode = [&](const Rect& region, std::unique_ptr<Canvas>& result) {
    const ptrdiff_t stride = region.width * 3 + (random.chance(50) ? 0 : random.between(0, 70));
    Status first = Status::ok;
    for (size_t i = 0; i < decoders.size(); i++) {
      auto canvas = std::make_unique<Canvas>(region, stride);
      const Status status = decoders[i].decode(region, canvas->pixels(), stride);
      STOKER_CHECK(canvas->guards_intact());
      if (i == 0) {
        first = status;
        result = std::move(canvas);
      } else {
        STOKER_CHECK(status == first);
        if (status == Status::ok) STOKER_CHECK(canvas->equals(*result, 0, 0));
      }
    }
    return first;
  };
  std::unique_ptr<Canvas> whole, part;
  const Status status = decode({0, 0, header.width, header.height}, whole);
  for (int i = 0; i < 2; i++) {
    Rect region;
    region.width = random.between(1, random.chance(50) ? header.width : std::min(header.width, 9));
    region.height =
        random.between(1, random.chance(50) ? header.height : std::min(header.height, 9));
    region.x = random.between(0, header.width - region.width);
    region.y = random.between(0, header.height - region.height);
    const Status part_status = decode(region, part);
    if (status != Status::ok) continue;  // a region may leave out what is wrong
    STOKER_CHECK(part_status == Status::ok);
    STOKER_CHECK(part->equals(*whole, region.x, region.y));
  }
}

// torch.exp by the C library, for plans of RandomResizedCrop: which values does not matter here.
void publish_exponentials(float low, float high) {
  auto table = std::make_shared<ExpTable>(low, high, false);
  std::vector<float> arguments(1 << 16), values(1 << 16);
  for (uint32_t first = 0; first < ExpTable::kDraws; first += uint32_t(arguments.size())) {
    table->arguments(first, arguments.data(), arguments.size());
    for (size_t i = 0; i < values.size(); i++) values[i] = float(std::exp(double(arguments[i])));
    table->check(first, arguments.data(), values.data(), values.size());
  }
  STOKER_CHECK(publish(table));
}

constexpr float kLogRatio = 0.287682086f;  // log(4 / 3)

void add_augmentation(Plan& plan, Random& random) {
  const auto number = [&](int least, int most) { return double(random.between(least, most)); };
  const double filter = 2 * double(random.below(3)), version = number(1, 2), drawn = number(0, 1);
  const double degrees = number(0, 400), nan = std::nan("");
  std::vector<double> numbers;
  switch (random.below(11)) {
    case 10:
      for (int i = 0; i < kTableNumbers; i++)
        numbers.push_back(number(0, 1 << 30) * number(0, 1 << 18));
      plan.add("look_up", numbers);
      break;
    case 9:
      numbers = {number(1, 99), number(1, 99)};
      for (int i = 0; i < 6; i++) numbers.push_back(number(-300, 300) / number(1, 200));
      numbers.insert(numbers.end(), {number(-9, 9) / 2000, number(-9, 9) / 2000, filter, 1, 2, 3});
      plan.add("perspective", numbers);
      break;
    case 8: plan.add("transpose", {}); break;
    case 6: plan.add("adjust", std::vector<double>{number(6, 15), number(1, 8)}); break;
    case 7:
      numbers = {number(1, 99), number(1, 99)};
      for (int i = 0; i < 6; i++) numbers.push_back(number(-300, 300) / number(1, 200));
      numbers.insert(numbers.end(), {filter, 1, 2, 3});
      plan.add("affine", numbers);
      break;
    case 0:
      for (int i = 0; i < 4; i++) {
        const double low = i == 3 ? -0.5 : 0.25 * number(0, 3);
        numbers.insert(numbers.end(), {number(0, 1), low, low + 0.5 * number(0, 2)});
      }
      numbers.push_back(0);
      plan.add("color_jitter", numbers);
      break;
    case 1: plan.add("random_operation", std::vector<double>{0.9, 1, number(6, 14), 3}); break;
    case 2:
      numbers = {version, number(0, 4), filter, 1, 2, 3, drawn, 31, number(0, 30), 2, 15};
      for (int operation = 0; operation < 15; operation++) {
        const double magnitude = operation == 3 || operation == 4 ? nan : number(1, 8);
        const double graded = operation > 0 && operation < 12;
        numbers.insert(numbers.end(), {double(operation), number(0, 1), graded, magnitude, 2});
      }
      plan.add("augment", numbers);
      break;
    case 3:
      numbers = {version, filter, 1, 2, 3, 10, 3};
      for (int i = 0; i < 6; i++)
        numbers.insert(numbers.end(), {number(0, 14), 0.7, number(0, 1), number(1, 8), 3});
      plan.add("auto_augment", numbers);
      break;
    case 4:
      plan.add("random_rotation", std::vector<double>{-degrees, degrees, 0, number(0, 1), drawn,
                                                      number(-50, 90), 7, filter, 4, 5, 6});
      break;
    default:
      plan.add("random_affine", std::vector<double>{-degrees,
                                                    degrees,
                                                    number(0, 1),
                                                    0.5,
                                                    0.9,
                                                    number(0, 1),
                                                    0.01,
                                                    number(1, 40),
                                                    2 * number(0, 2),
                                                    -80,
                                                    80,
                                                    -70,
                                                    89,
                                                    drawn,
                                                    3,
                                                    4,
                                                    filter,
                                                    7,
                                                    8,
                                                    9,
                                                    0,
                                                    version});
  }
}

Plan random_plan(Random& random) {
  Plan plan;
  plan.order = PassOrder(random.below(3));
  const auto side = [&] { return double(random.between(1, random.chance(80) ? 48 : 400)); };
  const auto share = [&] { return double(random.below(101)) / 100; };
  for (int count = random.between(0, 4); count > 0; count--) {
    const double filter = double(random.below(6)), mode = double(random.below(4));
    const double fill[] = {double(random.below(256)), double(random.below(256)), 7};
    const auto add = [&](const char* name, std::vector<double> numbers) {
      plan.add(name, numbers);
    };
    switch (random.below(15)) {
      case 0: add("resize", {2, side(), side(), 0, filter}); break;
      case 1: add("resize", {1, side(), 0, 0, filter}); break;
      case 2: add("center_crop", {side(), side()}); break;
      case 3: {
        const double pad = double(random.below(9));
        add("random_crop", {side(), side(), pad, pad, 0, pad, double(random.below(2)), mode,
                            fill[0], fill[1], fill[2], double(random.between(1, 2))});
        break;
      }
      case 4:
        add("random_resized_crop",
            {side(), side(), share() / 2, 1, -kLogRatio, kLogRatio, 0.75, 4.0 / 3, filter, 0});
        break;
      case 5: add(random.chance(50) ? "flip_x" : "flip_y", {share()}); break;
      case 6:
        add("pad", {double(random.below(20)), double(random.below(20)), double(random.below(20)),
                    double(random.below(20)), mode, fill[0], fill[1], fill[2]});
        break;
      case 7: add("gray", {}); break;
      case 8: add("random_gray", {share()}); break;
      default: add_augmentation(plan, random);
    }
  }
  if (random.chance(30))
    plan.add("random_erasing",
             std::vector<double>{share(), share() / 4, 0.5, -kLogRatio, kLogRatio, 0, 1, 2, 255});
  plan.conversion->channels = random.chance(80) ? 3 : 1;
  float table[3][256];
  uint16_t bits[3][256];
  const float mean[3] = {0.485f, 0.456f, 0.406f}, std[3] = {0.229f, 0.224f, 0.225f};
  for (int c = 0; c < 3; c++)
    for (int x = 0; x < 256; x++) {
      table[c][x] = (float(x) / 255.0f - mean[c]) / std[c];
      bits[c][x] = uint16_t(x * 7 + c);
    }
  switch (random.below(3)) {
    case 0: plan.conversion->format = PixelFormat::u8_chw; break;
    case 1:
      plan.conversion->format = PixelFormat::f32_chw;
      set_table(*plan.conversion, &table[0][0], random.chance(70) ? mean : nullptr, std);
      break;
    default:
      plan.conversion->format = PixelFormat::u16_chw;
      set_table(*plan.conversion, &bits[0][0]);
  }
  return plan;
}

// A whole sample: levels agree on status and bytes, and nothing is written outside of its place.
void check_sample(const uint8_t* data, size_t size, Random& random) {
  static const bool published = (publish_exponentials(-kLogRatio, kLogRatio), true);
  static std::vector<std::unique_ptr<Executor>> executors = [] {
    std::vector<std::unique_ptr<Executor>> all;
    for (int level = 0; level <= int(detected_level()); level++)
      all.push_back(std::make_unique<Executor>(SimdLevel(level)));
    return all;
  }();
  STOKER_CHECK(published);
  jpeg::Limits limits;
  limits.max_pixels = int64_t{1} << 18;
  int height = 0, width = 0;
  if (executors[0]->size(limits, data, size, height, width) != Status::ok) return;
  const Plan plan = random_plan(random);
  const uint32_t key = uint32_t(random.next());
  Generator generator;
  generator.seed(key);
  Steps steps;
  if (resolve(plan, width, height, generator, steps) != Status::ok) return;
  if (int64_t{steps.width} * steps.height > int64_t{1} << 18) return;
  const size_t item = plan.conversion->format == PixelFormat::f32_chw   ? 4
                      : plan.conversion->format == PixelFormat::u16_chw ? 2
                                                                        : 1;
  const size_t bytes =
      item * size_t(plan.conversion->channels) * size_t(steps.width) * size_t(steps.height);
  constexpr size_t kGuard = 64;
  std::vector<std::vector<uint8_t>> results;
  Status first = Status::ok;
  for (auto& executor : executors) {
    std::vector<uint8_t> memory(bytes + 2 * kGuard, 0xA5);
    const Status status = executor->run_encoded(plan, limits, data, size, key, steps.height,
                                                steps.width, memory.data() + kGuard);
    for (size_t i = 0; i < kGuard; i++)
      STOKER_CHECK(memory[i] == 0xA5 && memory[memory.size() - 1 - i] == 0xA5);
    if (results.empty()) first = status;
    STOKER_CHECK(status == first);
    results.push_back(std::move(memory));
    if (status == Status::ok) STOKER_CHECK(results.back() == results.front());
  }
}

struct Target {
  const char* name;
  void (*run)(const uint8_t* data, size_t size, Random& random);
};

constexpr Target kTargets[] = {
    {"decoder", check_decoder},
    {"sample", check_sample},
};

// ---- the run

struct Options {
  uint64_t seed = 1, first = 0, iterations = 20000;
  double seconds = 0;  // 0: no limit
  std::string target;  // empty: all
  std::vector<std::string> folders;
};

constexpr char kHelp[] =
    "stoker_fuzz [options] [folder ...]\n"
    "Runs the native code on broken files made from its own seeds and from the files in the "
    "folders.\n"
    "  --iterations N  inputs to try (20000)\n"
    "  --seconds S     stop after S seconds even if iterations are left (no limit)\n"
    "  --seed N        another N gives other inputs (1)\n"
    "  --first N       number of the first iteration, to repeat one (0)\n"
    "  --target NAME   only this target: decoder or sample\n"
    "  --help          this text\n";

bool parse_options(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; i++) {
    const std::string name = argv[i];
    if (name.compare(0, 2, "--") != 0) {
      options.folders.push_back(name);
      continue;
    }
    if (i + 1 >= argc) return false;
    const char* value = argv[++i];
    if (name == "--iterations") {
      options.iterations = std::strtoull(value, nullptr, 10);
    } else if (name == "--seconds") {
      options.seconds = std::strtod(value, nullptr);
    } else if (name == "--seed") {
      options.seed = std::strtoull(value, nullptr, 10);
    } else if (name == "--first") {
      options.first = std::strtoull(value, nullptr, 10);
    } else if (name == "--target") {
      options.target = value;
    } else {
      return false;
    }
  }
  return true;
}

int run(const Options& options) {
  Corpus corpus(options.seed);
  for (const std::string& folder : options.folders) {
    if (!std::filesystem::is_directory(folder)) {
      std::fprintf(stderr, "not a folder: %s\n", folder.c_str());
      return 2;
    }
    corpus.add(folder);
  }
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  std::printf("%zu files, seed %llu\n", corpus.size(),
              static_cast<unsigned long long>(options.seed));
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(keep_input);
  uint64_t done = 0;
  for (; done < options.iterations && (options.seconds <= 0 || elapsed() < options.seconds);
       done++) {
    current_iteration = options.first + done;
    Random random(options.seed * 0x2545f4914f6cdd1du + current_iteration);
    const File file = mutated(corpus, random);
    current_file = &file;
    // A block of exactly this size, so that sanitizers see every byte read beyond it.
    const std::unique_ptr<uint8_t[]> bytes(new uint8_t[file.size()]);
    std::copy(file.begin(), file.end(), bytes.get());
    for (const Target& target : kTargets)
      if (options.target.empty() || options.target == target.name)
        target.run(bytes.get(), file.size(), random);
    current_file = nullptr;
  }
  std::printf("%llu inputs, all checks hold, %.0f seconds\n", static_cast<unsigned long long>(done),
              elapsed());
  return 0;
}

}  // namespace
}  // namespace stoker::fuzz

int main(int argc, char** argv) {
  for (int i = 1; i < argc; i++) {
    if (std::string(argv[i]) == "--help") {
      std::fputs(stoker::fuzz::kHelp, stdout);
      return 0;
    }
  }
  stoker::fuzz::Options options;
  if (!stoker::fuzz::parse_options(argc, argv, options)) {
    std::fputs(stoker::fuzz::kHelp, stderr);
    return 2;
  }
  return stoker::fuzz::run(options);
}
