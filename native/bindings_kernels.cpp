// The kernels by themselves, for tests and benchmarks.
#include "bindings.hpp"

namespace stoker {

void bind_kernels(nb::module_& module) {
  module.def("levels", [] {
    std::vector<std::string> levels;
    for (int i = 0; i <= static_cast<int>(detected_level()); i++)
      levels.emplace_back(name(static_cast<SimdLevel>(i)));
    return levels;
  });
  module.def("allocations", [] { return buffer_allocations.load(); });
  module.def(
      "decode_jpeg",
      [](const nb::bytes& data, std::optional<std::tuple<int, int, int, int>> region,
         const std::string& level, bool upright) -> std::pair<std::string, nb::object> {
        jpeg::Decoder decoder(level_of(level));
        jpeg::Limits limits;
        limits.upright = upright;
        const auto* bytes = static_cast<const uint8_t*>(data.data());
        Status status = decoder.open(bytes, data.size(), limits);
        if (status != Status::ok) return {name(status), nb::none()};
        Rect rect{0, 0, decoder.header().width, decoder.header().height};
        if (region) {
          const auto [x, y, width, height] = *region;
          if (x < 0 || y < 0 || width <= 0 || height <= 0 || x > rect.width - width ||
              y > rect.height - height)
            throw nb::value_error("the region must lie inside the image");
          rect = {x, y, width, height};
        }
        auto pixels = new_array<uint8_t>(
            {static_cast<size_t>(rect.height), static_cast<size_t>(rect.width), 3});
        {
          const WithoutGil release;
          status = decoder.decode(rect, pixels.data(), static_cast<ptrdiff_t>(rect.width) * 3);
        }
        if (status != Status::ok) return {name(status), nb::none()};
        return {name(status), nb::cast(pixels)};
      },
      "data"_a, "region"_a = nb::none(), "level"_a, "upright"_a = false);
  module.def(
      "resize",
      [](const Image& image, std::pair<int, int> out_size,
         std::optional<std::tuple<int, int, int, int>> window, const std::string& filter,
         const std::string& order, bool flip_x, bool flip_y, bool gray, const std::string& level) {
        Resize resize;
        resize.height = static_cast<int>(image.shape(0));
        resize.width = static_cast<int>(image.shape(1));
        resize.out_height = out_size.first;
        resize.out_width = out_size.second;
        if (resize.width < 1 || resize.height < 1 || resize.out_width < 1 || resize.out_height < 1)
          throw nb::value_error("sizes must be positive");
        resize.window = {0, 0, resize.out_width, resize.out_height};
        if (window) {
          const auto [x, y, width, height] = *window;
          if (x < 0 || y < 0 || width < 1 || height < 1 || x > resize.out_width - width ||
              y > resize.out_height - height)
            throw nb::value_error("the window must lie inside the result");
          resize.window = {x, y, width, height};
        }
        resize.filter = filter_of(filter);
        resize.order = order_of(order);
        resize.flip_x = flip_x;
        Resampler resampler(level_of(level));
        const Rect needed = resampler.prepare(resize);
        const std::vector<uint8_t> pixels = dense(image);
        const ptrdiff_t stride = static_cast<ptrdiff_t>(resize.width) * 3;
        auto result = new_array<uint8_t>({static_cast<size_t>(resize.window.height),
                                          static_cast<size_t>(resize.window.width), 3});
        Conversion conversion;
        Output output;
        output.conversion = &conversion;
        output.data = result.data();
        output.width = resize.window.width;
        output.height = resize.window.height;
        output.stride = static_cast<ptrdiff_t>(output.width) * 3;
        output.flip_y = flip_y;
        output.gray = gray;
        {
          const WithoutGil release;
          resampler.run(pixels.data() + needed.y * stride + static_cast<ptrdiff_t>(needed.x) * 3,
                        stride, pixels.data() + pixels.size() - kRowSlack, output);
        }
        return result;
      },
      "image"_a, "out_size"_a, "window"_a = nb::none(), "filter"_a = "bilinear", "order"_a,
      "flip_x"_a = false, "flip_y"_a = false, "gray"_a = false, "level"_a);
  module.def(
      "convert",
      [](const Image& image, const Table& table, const Triple& mean, const Triple& std,
         int channels, bool flip_x, bool flip_y, bool gray, const std::string& level) {
        Conversion conversion;
        conversion.channels = channels == 1 ? 1 : 3;
        set_tail(conversion, table, mean, std);
        Output output;
        output.conversion = &conversion;
        output.height = static_cast<int>(image.shape(0));
        output.width = static_cast<int>(image.shape(1));
        output.flip_y = flip_y;
        output.gray = gray;
        const nb::object result =
            new_tensor(conversion.format, static_cast<size_t>(conversion.channels), image.shape(0),
                       image.shape(1), &output.data);
        const std::vector<uint8_t> pixels = dense(image);
        const ptrdiff_t stride = static_cast<ptrdiff_t>(output.width) * 3;
        std::vector<uint8_t> line(static_cast<size_t>(stride) + 2 * kRowSlack);
        convert_rows(level_of(level), pixels.data(), stride, 0, output.height, flip_x, line.data(),
                     output);
        return result;
      },
      "image"_a, "table"_a, "mean"_a, "std"_a, "channels"_a = 3, "flip_x"_a = false,
      "flip_y"_a = false, "gray"_a = false, "level"_a);
  module.def(
      "formula",
      [](const Table& table, const Triple& mean, const Triple& std) {
        Conversion conversion;
        set_tail(conversion, table, mean, std);
        return conversion.formula == Conversion::Formula::divide     ? "divide"
               : conversion.formula == Conversion::Formula::multiply ? "multiply"
                                                                     : "table";
      },
      "table"_a, "mean"_a, "std"_a);
}

}  // namespace stoker
