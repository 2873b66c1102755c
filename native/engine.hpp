// The thread pool of the process and the batches it works on.
//
// A Session belongs to one loader and says how many threads may serve it. A Batch is one job of n
// samples; samples, not batches, are handed to threads, so a slow image delays its own batch only.
// Samples that the native decoder declines wait in the session until Python takes them
// (src/stoker/fallback.py).
//
// Note [Thread rules]
// - One mutex, Pool::mutex_, guards every queue and counter that is not atomic. It is never held
// while a sample is worked on.
// - A Batch's arrays are written before submit() and read-only afterwards, except statuses[i] and
// details[i], which belong
//   to whoever runs sample i until `remaining` reaches it.
// - plan, files and out are borrowed: they must stay valid until the batch is finished (remaining
// is 0, so no thread looks
//   at them any more) or cancel() has returned. A thread may drop the last reference to a Batch
//   itself, without the GIL.
// - Nothing here throws across a thread, touches Python, or survives fork(): a child makes a new
// Pool.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "execute.hpp"
#include "reader.hpp"

namespace stoker {

class Session;

// shared_from_this: the bindings must find the C++ owner. A pointer that owned the Python object
// would need the GIL when a thread drops it.
struct Batch : std::enable_shared_from_this<Batch> {
  const Plan* plan = nullptr;
  std::vector<Plan> plans;  // one per sample where they were recorded; then `plan` says nothing
  const Files* files = nullptr;
  std::vector<int64_t> rows;
  std::vector<uint32_t> keys;
  uint8_t* out = nullptr;
  size_t sample_bytes = 0;
  int height = 0, width = 0;

  std::vector<Status> statuses;
  std::vector<int64_t> details;
  std::atomic<int> next{0};       // first sample that no thread has taken
  std::atomic<int> remaining{0};  // samples that are not finished
  int size() const { return static_cast<int>(rows.size()); }
  const Plan& plan_of(int sample) const { return plans.empty() ? *plan : plans[sample]; }
};

struct Declined {
  std::shared_ptr<Batch> batch;
  int sample = 0;
};

// Runs a plan on encoded bytes, on the calling thread, whose tools are kept for the next time.
Status run_encoded_here(const Plan& plan, const uint8_t* data, size_t size, int height, int width,
                        void* out);
// The same from dense RGB pixels.
Status run_pixels_here(const Plan& plan, const uint8_t* pixels, int image_height, int image_width,
                       int height, int width, void* out);

// Size of file `row` from its header, on the calling thread.
Status image_size(const Files& files, int64_t row, int& height, int& width);

class Pool : public std::enable_shared_from_this<Pool> {
 public:
  explicit Pool(SimdLevel level) : level_(level) {}
  ~Pool();

  std::shared_ptr<Session> open_session(int threads);
  void close_session(const std::shared_ptr<Session>& session);

  void submit(const std::shared_ptr<Session>& session, std::shared_ptr<Batch> batch);
  // Runs samples on the calling thread for about as long as `slice`; true when all have been run.
  bool run_here(Session& session, const std::shared_ptr<Batch>& batch,
                std::chrono::milliseconds slice);
  // True when the batch is finished; false after `timeout`, or with `watch` as soon as a declined
  // sample waits.
  bool wait(Session& session, Batch& batch, std::chrono::milliseconds timeout, bool watch);
  // Returns when no thread works on the batch any more; what was not started is Status::cancelled.
  void cancel(Session& session, Batch& batch);

  // True while declined samples wait.
  bool declines(Session& session);
  // The next declined sample; empty after `timeout` or when the session is closed.
  std::optional<Declined> take_declined(Session& session, std::chrono::milliseconds timeout);
  // Finishes a declined sample from pixels that Pillow decoded, on the calling thread.
  Status finish_pixels(Session& session, Batch& batch, int sample, const uint8_t* pixels,
                       ptrdiff_t stride, int height, int width);
  void finish_failed(Session& session, Batch& batch, int sample, Status status);

  int threads();
  SimdLevel level() const { return level_; }
  const std::vector<std::shared_ptr<Session>>& sessions() const { return sessions_; }

 private:
  void work();
  void run_sample(Executor& executor, Session& session, const std::shared_ptr<Batch>& batch,
                  int sample);
  void finish(Session& session, Batch& batch, int sample, Status status);
  bool find_work(std::shared_ptr<Session>& session, std::shared_ptr<Batch>& batch);

  const SimdLevel level_;
  std::mutex lifecycle_;  // held while threads are started or joined, before mutex_
  std::mutex mutex_;
  std::condition_variable work_;
  std::vector<std::thread> threads_;
  std::vector<std::shared_ptr<Session>> sessions_;
  size_t turn_ = 0;  // sessions take turns
  bool stop_ = false;
};

// Opaque outside of Pool.
class Session : public std::enable_shared_from_this<Session> {
 public:
  explicit Session(int threads) : limit(threads) {}

  // Samples that were read, decoded and transformed natively, and the CPU time of that.
  std::atomic<int64_t> samples{0}, cpu_ns{0};

 private:
  friend class Pool;
  const int limit;
  int active = 0;
  bool closed = false;
  std::deque<std::shared_ptr<Batch>> queue;
  std::deque<Declined> declined;
  std::condition_variable finished, declines;
};

}  // namespace stoker
