#include "engine.hpp"

#include <algorithm>
#include <ctime>
#include <memory>
#include <new>
#include <utility>

namespace stoker {
namespace {

// Executor of a Python thread (run_here, finish_pixels): kept per thread and level, freed with the
// thread.
Executor& calling_thread_executor(SimdLevel level) {
  thread_local std::unique_ptr<Executor> executor;
  thread_local SimdLevel built = SimdLevel::scalar;
  if (!executor || built != level) {
    executor = std::make_unique<Executor>(level);
    built = level;
  }
  return *executor;
}

// CPU time of the calling thread; time that passes, where the system does not tell.
int64_t cpu_ns() {
#ifdef CLOCK_THREAD_CPUTIME_ID
  timespec used{};
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) == 0)
    return int64_t{used.tv_sec} * 1'000'000'000 + used.tv_nsec;
#endif
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

Status run_encoded_here(const Plan& plan, const uint8_t* data, size_t size, int height, int width,
                        void* out) {
  try {
    return calling_thread_executor(detected_level())
        .run_encoded(plan, {}, data, size, 0, height, width, out);
  } catch (const std::bad_alloc&) {
    return Status::out_of_memory;
  }
}

Status run_pixels_here(const Plan& plan, const uint8_t* pixels, int image_height, int image_width,
                       int height, int width, void* out) {
  try {
    return calling_thread_executor(detected_level())
        .run_pixels(plan, pixels, static_cast<ptrdiff_t>(image_width) * 3, image_height,
                    image_width, 0, height, width, out);
  } catch (const std::bad_alloc&) {
    return Status::out_of_memory;
  }
}

Status image_size(const Files& files, int64_t row, int& height, int& width) {
  Executor& executor = calling_thread_executor(detected_level());
  try {
    const FileBytes file = read_file(files, row, executor.file());
    if (file.status != Status::ok) return file.status;
    return executor.size({files.max_pixels, files.upright}, file.data, file.size, height, width);
  } catch (const std::bad_alloc&) {
    return Status::out_of_memory;
  }
}

Pool::~Pool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

int Pool::threads() {
  const std::lock_guard lock(mutex_);
  return static_cast<int>(threads_.size());
}

std::shared_ptr<Session> Pool::open_session(int threads) {
  auto session = std::make_shared<Session>(threads);
  const std::lock_guard lifecycle(lifecycle_);
  const std::lock_guard lock(mutex_);
  sessions_.push_back(session);
  while (static_cast<int>(threads_.size()) < threads) threads_.emplace_back([this] { work(); });
  return session;
}

void Pool::close_session(const std::shared_ptr<Session>& session) {
  const std::lock_guard lifecycle(lifecycle_);
  std::vector<std::thread> stopped;
  {
    const std::lock_guard lock(mutex_);
    if (session->closed) return;
    session->closed = true;
    std::erase(sessions_, session);
    session->queue.clear();
    session->declined.clear();
    session->declines.notify_all();
    if (sessions_.empty()) {  // the last loader is gone: leave no thread behind
      stop_ = true;
      work_.notify_all();
      stopped.swap(threads_);
    }
  }
  for (std::thread& thread : stopped) thread.join();
  const std::lock_guard lock(mutex_);
  stop_ = false;
}

void Pool::submit(const std::shared_ptr<Session>& session, std::shared_ptr<Batch> batch) {
  {
    const std::lock_guard lock(mutex_);
    session->queue.push_back(std::move(batch));
  }
  work_.notify_all();
}

bool Pool::find_work(std::shared_ptr<Session>& session, std::shared_ptr<Batch>& batch) {
  for (size_t i = 0; i < sessions_.size(); i++) {
    const auto& candidate = sessions_[(turn_ + i) % sessions_.size()];
    if (candidate->active >= candidate->limit) continue;
    while (!candidate->queue.empty() &&
           candidate->queue.front()->next.load() >= candidate->queue.front()->size())
      candidate->queue.pop_front();
    if (candidate->queue.empty()) continue;
    session = candidate;
    batch = candidate->queue.front();
    turn_ = (turn_ + i + 1) % sessions_.size();
    return true;
  }
  return false;
}

void Pool::work() {
  Executor executor(level_);
  std::shared_ptr<Session> session;
  std::shared_ptr<Batch> batch;
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stop_ || find_work(session, batch); });
    if (stop_) return;
    session->active++;
    lock.unlock();
    for (int i; (i = batch->next.fetch_add(1)) < batch->size();)
      run_sample(executor, *session, batch, i);
    batch.reset();
    lock.lock();
    session->active--;
    session.reset();
  }
}

void Pool::run_sample(Executor& executor, Session& session, const std::shared_ptr<Batch>& batch,
                      int sample) {
  const Files& files = *batch->files;
  const int64_t begun = cpu_ns();
  Status status;
  try {
    const FileBytes file = read_file(files, batch->rows[sample], executor.file());
    batch->details[sample] = file.detail;
    status = file.status;
    if (status == Status::ok) {
      const jpeg::Limits limits{files.max_pixels, files.upright};
      status = executor.run_encoded(batch->plan_of(sample), limits, file.data, file.size,
                                    batch->keys[sample], batch->height, batch->width,
                                    batch->out + batch->sample_bytes * sample);
    }
  } catch (const std::bad_alloc&) {
    status = Status::out_of_memory;
  }
  session.cpu_ns += cpu_ns() - begun;
  session.samples++;
  if (declined(status)) {
    const std::lock_guard lock(mutex_);
    batch->statuses[sample] = status;
    if (!session.closed) {
      session.declined.push_back({batch, sample});
      session.declines.notify_one();
      session.finished.notify_all();
      return;
    }
  }
  finish(session, *batch, sample, status);
}

void Pool::finish(Session& session, Batch& batch, int sample, Status status) {
  batch.statuses[sample] = status;
  if (batch.remaining.fetch_sub(1) == 1) {
    const std::lock_guard lock(mutex_);
    session.finished.notify_all();
  }
}

bool Pool::run_here(Session& session, const std::shared_ptr<Batch>& batch,
                    std::chrono::milliseconds slice) {
  Executor& executor = calling_thread_executor(level_);
  const auto until = std::chrono::steady_clock::now() + slice;
  for (int i; (i = batch->next.fetch_add(1)) < batch->size();) {
    run_sample(executor, session, batch, i);
    if (std::chrono::steady_clock::now() >= until) return i + 1 == batch->size();
  }
  return true;
}

bool Pool::wait(Session& session, Batch& batch, std::chrono::milliseconds timeout, bool watch) {
  if (batch.remaining.load() == 0) return true;
  std::unique_lock lock(mutex_);
  session.finished.wait_for(lock, timeout, [&] {
    return batch.remaining.load() == 0 || (watch && !session.declined.empty());
  });
  return batch.remaining.load() == 0;
}

void Pool::cancel(Session& session, Batch& batch) {
  std::unique_lock lock(mutex_);
  const int size = batch.size();
  const int taken = std::min(batch.next.exchange(size), size);
  for (int i = taken; i < size; i++) batch.statuses[i] = Status::cancelled;
  batch.remaining.fetch_sub(size - taken);
  const size_t waiting = std::erase_if(session.declined, [&](const Declined& declined) {
    if (declined.batch.get() != &batch) return false;
    batch.statuses[declined.sample] = Status::cancelled;
    return true;
  });
  batch.remaining.fetch_sub(static_cast<int>(waiting));
  session.finished.wait(lock, [&] {
    // A thread that was at work may have declined its sample meanwhile.
    const size_t late = std::erase_if(
        session.declined, [&](const Declined& declined) { return declined.batch.get() == &batch; });
    batch.remaining.fetch_sub(static_cast<int>(late));
    return batch.remaining.load() == 0;
  });
}

bool Pool::declines(Session& session) {
  const std::lock_guard lock(mutex_);
  return !session.declined.empty();
}

std::optional<Declined> Pool::take_declined(Session& session, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  session.declines.wait_for(lock, timeout,
                            [&] { return session.closed || !session.declined.empty(); });
  if (session.closed || session.declined.empty()) return std::nullopt;
  Declined declined = std::move(session.declined.front());
  session.declined.pop_front();
  return declined;
}

Status Pool::finish_pixels(Session& session, Batch& batch, int sample, const uint8_t* pixels,
                           ptrdiff_t stride, int height, int width) {
  const Status status = calling_thread_executor(level_).run_pixels(
      batch.plan_of(sample), pixels, stride, height, width, batch.keys[sample], batch.height,
      batch.width, batch.out + batch.sample_bytes * sample);
  finish(session, batch, sample, status);
  return status;
}

void Pool::finish_failed(Session& session, Batch& batch, int sample, Status status) {
  finish(session, batch, sample, status);
}

}  // namespace stoker
