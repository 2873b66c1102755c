// The module stoker._native: plain memory in, plain memory out. With bindings_kernels.cpp the only
// file that knows of Python.
#include "bindings.hpp"

using namespace stoker;
using namespace nb::literals;

namespace {

void bind_plan(nb::module_& module) {
  nb::class_<Plan>(module, "Plan")
      .def(nb::init<>())
      .def("add", [](Plan& plan, const std::string& op,
                     const std::vector<double>& numbers) { plan.add(op, numbers); })
      .def("set_order", [](Plan& plan, const std::string& order) { plan.order = order_of(order); })
      .def(
          "set_tail",
          [](Plan& plan, int channels, const std::optional<Table>& table, const Triple& mean,
             const Triple& std) {
            plan.conversion->channels = channels == 1 ? 1 : 3;
            if (table)
              set_tail(*plan.conversion, *table, mean, std);
            else
              plan.conversion->format = PixelFormat::u8_chw;
          },
          "channels"_a, "table"_a.none(), "mean"_a, "std"_a,
          "table: (3, 256) float32, or uint16 bit patterns of a 16-bit float; None keeps bytes.")
      .def("set_interleaved", [](Plan& plan) { plan.conversion->format = PixelFormat::u8_hwc; })
      .def(
          "run_recorded",
          [](const Plan& plan, const std::vector<double>& code,
             const std::variant<nb::bytes, Pixels>& data, int height, int width,
             const std::optional<Memory>& out) -> std::pair<std::string, nb::object> {
            if (height < 1 || width < 1) throw nb::value_error("sizes must be positive");
            Plan own = plan;
            own.add_all(code);
            const PixelFormat format = plan.conversion->format;
            const size_t channels = static_cast<size_t>(plan.conversion->channels);
            void* target = nullptr;
            nb::object result = nb::none();
            if (out) {
              if (out->size() < element_bytes(format) * channels * static_cast<size_t>(height) *
                                    static_cast<size_t>(width))
                throw nb::value_error("the memory is smaller than the image");
              target = out->data();
            } else {
              result = format == PixelFormat::u8_hwc
                           ? new_tensor(format, static_cast<size_t>(height),
                                        static_cast<size_t>(width), channels, &target)
                           : new_tensor(format, channels, static_cast<size_t>(height),
                                        static_cast<size_t>(width), &target);
            }
            Status status;
            {
              const WithoutGil release;
              if (const auto* pixels = std::get_if<Pixels>(&data)) {
                status = run_pixels_here(own, pixels->data(), static_cast<int>(pixels->shape(0)),
                                         static_cast<int>(pixels->shape(1)), height, width, target);
              } else {
                const nb::bytes& file = std::get<nb::bytes>(data);
                status = run_encoded_here(own, static_cast<const uint8_t*>(file.data()),
                                          file.size(), height, width, target);
              }
            }
            return {name(status), status == Status::ok ? result : nb::none()};
          },
          "code"_a, "data"_a, "height"_a, "width"_a, "out"_a = nb::none(),
          "data: an encoded image, or pixels of shape (height, width, 3)")
      .def("run_encoded",
           [](const Plan& plan, const nb::bytes& data, uint32_t key, int height, int width,
              const std::string& level) -> std::pair<std::string, nb::object> {
             Executor executor(level_of(level));
             void* out = nullptr;
             nb::object result =
                 new_tensor(plan.conversion->format, static_cast<size_t>(plan.conversion->channels),
                            static_cast<size_t>(height), static_cast<size_t>(width), &out);
             const Status status =
                 executor.run_encoded(plan, {}, static_cast<const uint8_t*>(data.data()),
                                      data.size(), key, height, width, out);
             return {name(status), status == Status::ok ? result : nb::none()};
           })
      .def("run_pixels", [](const Plan& plan, const Pixels& image, uint32_t key, int height,
                            int width, const std::string& level) {
        Executor executor(level_of(level));
        void* out = nullptr;
        nb::object result =
            new_tensor(plan.conversion->format, static_cast<size_t>(plan.conversion->channels),
                       static_cast<size_t>(height), static_cast<size_t>(width), &out);
        const int image_height = static_cast<int>(image.shape(0));
        const int image_width = static_cast<int>(image.shape(1));
        Status status;
        {
          const WithoutGil release;
          status = executor.run_pixels(plan, image.data(), ptrdiff_t{image_width} * 3, image_height,
                                       image_width, key, height, width, out);
        }
        return std::make_pair(std::string(name(status)),
                              status == Status::ok ? result : nb::none());
      });
  module.def("operations", [] {
    std::vector<std::pair<std::string, size_t>> list;
    for (const OperationName& operation : operations())
      list.emplace_back(operation.name, operation.numbers);
    return list;
  });
  module.def(
      "resolve",
      [](const Plan& plan, int width, int height, uint32_t key) {
        Generator generator;
        generator.seed(key);
        Steps steps;
        const Status status = resolve(plan, width, height, generator, steps);
        nb::list list;
        const char* filters[] = {"nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"};
        const char* modes[] = {"constant", "edge", "reflect", "symmetric"};
        for (int i = 0; i < steps.count && status == Status::ok; i++) {
          const Step& step = steps.items[i];
          nb::dict item;
          item["kind"] = std::string(kStepNames[static_cast<int>(step.kind)]);
          item["width"] = step.width;
          item["height"] = step.height;
          item["x"] = step.x;
          item["y"] = step.y;
          item["filter"] = filters[static_cast<int>(step.filter)];
          item["mode"] = modes[static_cast<int>(step.mode)];
          item["fill"] = nb::make_tuple(step.fill[0], step.fill[1], step.fill[2]);
          item["amount"] = step.amount;
          const double (&m)[8] = step.matrix;
          item["matrix"] = nb::make_tuple(m[0], m[1], m[2], m[3], m[4], m[5]);
          item["erased_size"] = nb::make_tuple(step.erased_height, step.erased_width);
          list.append(item);
        }
        return nb::make_tuple(name(status), list, generator.drawn());
      },
      "plan"_a, "width"_a, "height"_a, "key"_a, "(status, steps, 32-bit words drawn)");
}

void bind_random(nb::module_& module) {
  using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  using ConstFloats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
  nb::class_<Generator>(module, "Generator")
      .def("__init__",
           [](Generator* self, uint32_t seed) {
             new (self) Generator();
             self->seed(seed);
           })
      .def("next", &Generator::next)
      .def("uniform", nb::overload_cast<>(&Generator::uniform))
      .def("uniform", nb::overload_cast<float, float, bool>(&Generator::uniform))
      .def("below", [](Generator& generator, int64_t bound) {
        if (bound < 1 || bound > int64_t{1} << 28) throw nb::value_error("bound out of range");
        return generator.below(bound);
      });
  nb::class_<ExpTable>(module, "ExpTable", "Note [Proven exponentials]")
      .def("__init__",
           [](ExpTable* self, float low, float high, bool fused) {
             if (!(low <= high && low > -32 && high < 32))
               throw nb::value_error("low and high out of range");
             new (self) ExpTable(low, high, fused);
           })
      .def("arguments",
           [](const ExpTable& table, uint32_t first, const Floats& out) {
             if (first > ExpTable::kDraws || out.size() > ExpTable::kDraws - first)
               throw nb::value_error("outside of the 2^24 draws");
             const WithoutGil release;
             table.arguments(first, out.data(), out.size());
           })
      .def("check",
           [](ExpTable& table, uint32_t first, const ConstFloats& x, const ConstFloats& values) {
             if (first > ExpTable::kDraws || values.size() > ExpTable::kDraws - first ||
                 values.size() != x.size())
               throw nb::value_error("outside of the 2^24 draws");
             const WithoutGil release;
             return table.check(first, x.data(), values.data(), values.size());
           })
      .def("value",
           [](const ExpTable& table, uint32_t draw) {
             if (draw >= ExpTable::kDraws || !table.proven()) throw nb::value_error("not proven");
             return table.value(draw);
           })
      .def_prop_ro("proven", &ExpTable::proven)
      .def_prop_ro("exceptions", &ExpTable::exceptions)
      .def(
          "publish",
          [](const ExpTable& table) { return publish(std::make_shared<const ExpTable>(table)); },
          "Makes a proven table available to every Plan; False where it is not proven.")
      .def_static("published", [](float low, float high, bool fused) {
        return find_exp_table(low, high, fused) != nullptr;
      });
}

// Ascending, from the beginning of what they divide to its end at most.
void require_offsets(const Offsets& offsets, size_t size) {
  if (offsets.size() < 1) throw nb::value_error("offsets must hold one number at least");
  const uint64_t* o = offsets.data();
  for (size_t i = 0; i + 1 < offsets.size(); i++)
    if (o[i] > o[i + 1]) throw nb::value_error("offsets must not descend");
  if (o[offsets.size() - 1] > size)
    throw nb::value_error("offsets must lie inside of what they divide");
}

void bind_engine(nb::module_& module) {
  nb::class_<Files>(module, "Files")
      .def(
          "__init__",
          [](Files* self, const nb::bytes& root, const Bytes1d& names, const Offsets& offsets,
             std::optional<int64_t> max_bytes, std::optional<int64_t> max_pixels, bool upright,
             const std::optional<Identities>& identities, const std::optional<Extents>& extents,
             const std::optional<Contents>& contents) {
            if (identities && identities->shape(0) + 1 != offsets.size())
              throw nb::value_error("one identity per file");
            require_offsets(offsets, names.size());
            if (contents) {
              const auto& [bytes, places] = *contents;
              if (extents || places.size() != offsets.size())
                throw nb::value_error("one content per file");
              require_offsets(places, bytes.size());
            }
            new (self) Files();
            const char* text = static_cast<const char*>(root.data());
            self->root.assign(text, text + root.size());
            self->names = reinterpret_cast<const char*>(names.data());
            self->offsets = offsets.data();
            self->count = static_cast<int64_t>(offsets.size()) - 1;
            if (max_bytes) self->max_bytes = *max_bytes;
            if (max_pixels) self->max_pixels = *max_pixels;
            self->upright = upright;
            if (identities) self->identities = identities->data();
            if (contents) {
              self->contents = std::get<0>(*contents).data();
              self->content_offsets = std::get<1>(*contents).data();
            }
            if (!extents) return;
            const auto& [shards, begins, lengths] = *extents;
            if (begins.size() != shards.size() || lengths.size() != shards.size())
              throw nb::value_error("one shard, begin and length per row");
            for (size_t i = 0; i < shards.size(); i++)
              if (shards.data()[i] + uint64_t{1} >= offsets.size() || begins.data()[i] < 0 ||
                  lengths.data()[i] < 0)
                throw nb::value_error("extents must lie inside of the shards");
            self->shards = shards.data();
            self->begins = begins.data();
            self->lengths = lengths.data();
            self->count = static_cast<int64_t>(shards.size());
          },
          "root"_a, "names"_a, "offsets"_a, "max_bytes"_a.none(), "max_pixels"_a.none(),
          "upright"_a, "identities"_a = nb::none(), "extents"_a = nb::none(),
          "contents"_a = nb::none(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          nb::keep_alive<1, 8>(), nb::keep_alive<1, 9>(), nb::keep_alive<1, 10>());
  module.def(
      "image_size",
      [](const Files& files, int64_t row) -> std::optional<std::pair<int, int>> {
        if (row < 0 || row >= files.count) throw nb::index_error("row outside of the files");
        const WithoutGil release;
        int height = 0, width = 0;
        if (image_size(files, row, height, width) != Status::ok) return std::nullopt;
        return std::make_pair(height, width);
      },
      "files"_a, "row"_a);
  const auto prepare = [](const std::shared_ptr<Batch>& batch, const Plan& plan, const Files& files,
                          const Memory& out, int height, int width) {
    if (height < 1 || width < 1) throw nb::value_error("sizes must be positive");
    batch->plan = &plan;
    batch->files = &files;
    batch->out = out.data();
    batch->height = height;
    batch->width = width;
    batch->sample_bytes = element_bytes(plan.conversion->format) *
                          static_cast<size_t>(plan.conversion->channels) *
                          static_cast<size_t>(height) * static_cast<size_t>(width);
    if (out.size() < batch->sample_bytes * batch->rows.size())
      throw nb::value_error("the memory is smaller than the batch");
    batch->statuses.assign(batch->rows.size(), Status::ok);
    batch->details.assign(batch->rows.size(), 0);
    batch->remaining = batch->size();
  };
  nb::class_<Batch>(module, "Batch")
      .def_static(
          "new",
          [prepare](const Plan& plan, const Files& files, const Rows& rows, const Keys& keys,
                    const Memory& out, int channels, int height, int width) {
            if (rows.size() != keys.size()) throw nb::value_error("one key per row");
            for (size_t i = 0; i < rows.size(); i++)
              if (rows.data()[i] < 0 || rows.data()[i] >= files.count)
                throw nb::index_error("row outside of the files");
            if (channels != plan.conversion->channels)
              throw nb::value_error("the plan gives another number of channels");
            auto batch = std::make_shared<Batch>();
            batch->rows.assign(rows.data(), rows.data() + rows.size());
            batch->keys.assign(keys.data(), keys.data() + keys.size());
            prepare(batch, plan, files, out, height, width);
            return batch;
          },
          "plan"_a, "files"_a, "rows"_a, "keys"_a, "out"_a, "channels"_a, "height"_a, "width"_a,
          nb::keep_alive<0, 1>(), nb::keep_alive<0, 2>(), nb::keep_alive<0, 5>())
      .def_static(
          "recorded",
          [prepare](const Plan& plan, const Files& files, const Code& code, const Offsets& ends,
                    const Memory& out, int height, int width) {
            if (static_cast<int64_t>(ends.size()) != files.count)
              throw nb::value_error("one end per file");
            auto batch = std::make_shared<Batch>();
            size_t from = 0;
            for (size_t i = 0; i < ends.size(); i++) {
              const size_t end = static_cast<size_t>(ends.data()[i]);
              if (end < from || end > code.size()) throw nb::value_error("ends must ascend");
              Plan own = plan;
              own.add_all({code.data() + from, end - from});
              if (own.draws) throw nb::value_error("a recorded sample draws nothing");
              batch->plans.push_back(std::move(own));
              batch->rows.push_back(static_cast<int64_t>(i));
              from = end;
            }
            batch->keys.assign(batch->rows.size(), 0);
            prepare(batch, plan, files, out, height, width);
            return batch;
          },
          "plan"_a, "files"_a, "code"_a, "ends"_a, "out"_a, "height"_a, "width"_a,
          nb::keep_alive<0, 2>(), nb::keep_alive<0, 5>())
      .def("failures",
           [](const Batch& batch) {
             std::vector<std::tuple<int, std::string, int64_t>> list;
             for (int i = 0; i < batch.size(); i++)
               if (batch.statuses[i] != Status::ok)
                 list.emplace_back(i, name(batch.statuses[i]), batch.details[i]);
             return list;
           })
      .def_prop_ro("done", [](const Batch& batch) { return batch.remaining.load() == 0; });
  nb::class_<Session>(module, "Session")
      .def_prop_ro("samples", [](const Session& session) { return session.samples.load(); })
      .def_prop_ro("cpu_seconds",
                   [](const Session& session) { return 1e-9 * double(session.cpu_ns.load()); });
  nb::class_<Pool>(module, "Pool")
      .def(nb::new_([](const std::optional<std::string>& level) {
             return std::make_shared<Pool>(level ? level_of(*level) : detected_level());
           }),
           "level"_a = nb::none())
      .def_prop_ro("threads", &Pool::threads)
      .def_prop_ro("level", [](const Pool& pool) { return name(pool.level()); })
      .def("open_session", &Pool::open_session, "threads"_a, nb::call_guard<WithoutGil>())
      .def("close_session", &Pool::close_session, nb::call_guard<WithoutGil>())
      .def("submit", &Pool::submit, nb::call_guard<WithoutGil>())
      .def(
          "run_here",
          [](Pool& pool, Session& session, const std::shared_ptr<Batch>& batch) {
            constexpr double kForever = 1e9;
            wait_interruptibly(kForever, [&](std::chrono::milliseconds slice) {
              return pool.run_here(session, batch, slice);
            });
          },
          "session"_a, "batch"_a)
      .def(
          "wait",
          [](Pool& pool, Session& session, Batch& batch, double seconds, bool watch) {
            bool declined = false;
            wait_interruptibly(seconds, [&](std::chrono::milliseconds slice) {
              const auto before = std::chrono::steady_clock::now();
              if (pool.wait(session, batch, slice, watch)) return true;
              declined = watch && std::chrono::steady_clock::now() - before < slice;
              return declined;
            });
            return batch.remaining.load() == 0;
          },
          "session"_a, "batch"_a, "seconds"_a, "watch"_a)
      .def("declines", &Pool::declines, nb::call_guard<WithoutGil>())
      .def("cancel", &Pool::cancel, nb::call_guard<WithoutGil>())
      .def(
          "take_declined",
          [](Pool& pool, Session& session,
             double seconds) -> std::optional<std::tuple<std::shared_ptr<Batch>, int, int64_t>> {
            std::optional<Declined> taken;
            {
              const WithoutGil release;
              taken = pool.take_declined(
                  session, std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3)));
            }
            if (!taken) return std::nullopt;
            const int64_t row = taken->batch->rows[static_cast<size_t>(taken->sample)];
            return std::make_tuple(taken->batch, taken->sample, row);
          },
          "session"_a, "seconds"_a)
      .def("finish_pixels",
           [](Pool& pool, Session& session, Batch& batch, int sample, const Pixels& image) {
             if (sample < 0 || sample >= batch.size()) throw nb::index_error("sample");
             const WithoutGil release;
             return std::string(name(pool.finish_pixels(
                 session, batch, sample, image.data(), static_cast<ptrdiff_t>(image.shape(1)) * 3,
                 static_cast<int>(image.shape(0)), static_cast<int>(image.shape(1)))));
           })
      .def(
          "finish_failed",
          [](Pool& pool, Session& session, Batch& batch, int sample) {
            if (sample < 0 || sample >= batch.size()) throw nb::index_error("sample");
            pool.finish_failed(session, batch, sample, Status::fallback_failed);
          },
          nb::call_guard<WithoutGil>())
      .def("abandon", [](const std::shared_ptr<Pool>& pool) {
        // In a forked child: threads are gone and their locks may be held for ever, so nothing may
        // be destroyed.
        new std::shared_ptr<Pool>(pool);
        new std::vector<std::shared_ptr<Session>>(pool->sessions());
      });
}

}  // namespace

NB_MODULE(_native, module) {
  nb::set_leak_warnings(false);
  bind_kernels(module);
  bind_plan(module);
  bind_random(module);
  bind_engine(module);
}
