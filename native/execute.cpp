#include "execute.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "affine.hpp"
#include "colour.hpp"

namespace stoker {
namespace {

// Cropping inside the image, flips and gray commute with the conversion to the tensor: the fused
// path does them on the fly. Erasing comes after it.
bool inside(const Step& step, int width, int height) {
  return step.x >= 0 && step.y >= 0 && step.x + step.width <= width &&
         step.y + step.height <= height;
}

size_t image_bytes(const Rect& rect) {
  return static_cast<size_t>(rect.width) * 3 * static_cast<size_t>(rect.height) + kRowSlack;
}

}  // namespace

Executor::Executor(SimdLevel level) : level_(level), decoder_(level), resampler_(level) {}

bool Executor::fused(const Step& step, int index) const {
  switch (step.kind) {
    case Step::Kind::crop: return inside(step, widths_[index], heights_[index]);
    case Step::Kind::flip_x:
    case Step::Kind::flip_y:
    case Step::Kind::gray:
    case Step::Kind::erase: return true;
    default: return false;
  }
}

// Draws, then walks back from the output to what is needed of the source image.
Status Executor::geometry(const Plan& plan, int image_height, int image_width, uint32_t key,
                          int height, int width) {
  if (plan.draws) generator_.seed(key);
  const Status status = resolve(plan, image_width, image_height, generator_, steps_);
  if (status != Status::ok) return status;
  if (steps_.width != width || steps_.height != height) return Status::bad_geometry;
  widths_[0] = image_width;
  heights_[0] = image_height;
  for (int i = 0; i < steps_.count; i++) {
    widths_[i + 1] = steps_.items[i].width;
    heights_[i + 1] = steps_.items[i].height;
  }
  last_ = steps_.count - 1;
  while (last_ >= 0 && fused(steps_.items[last_], last_)) last_--;
  prepared_ = -1;
  regions_[steps_.count] = {0, 0, width, height};
  for (int i = steps_.count - 1; i >= 0; i--) {
    const Step& step = steps_.items[i];
    Rect& region = regions_[i];
    if (step.kind == Step::Kind::resize) {
      Resize resize{widths_[i], heights_[i], step.width, step.height, regions_[i + 1]};
      resize.filter = step.filter;
      resize.order = plan.order;
      for (int j = i + 1; j < (i == last_ ? steps_.count : std::min(i + 2, steps_.count)); j++)
        resize.flip_x ^= steps_.items[j].kind == Step::Kind::flip_x;
      region = resampler_.prepare(resize);
      prepared_ = i;
    } else {
      region = source_region(step, widths_[i], heights_[i], regions_[i + 1]);
      if (region.width <= 0 || region.height <= 0) region = {0, 0, 1, 1};  // all fill
    }
  }
  return Status::ok;
}

// Writes the erased rectangles into the tensor; flips that follow an erasing move it.
void Executor::erase(const Plan& plan, void* out) const {
  const int64_t plane = int64_t{steps_.width} * steps_.height;
  for (int i = last_ + 1; i < steps_.count; i++) {
    const Step& step = steps_.items[i];
    if (step.kind != Step::Kind::erase) continue;
    Rect rect{step.x, step.y, step.erased_width, step.erased_height};
    for (int j = i + 1; j < steps_.count; j++) {
      if (steps_.items[j].kind == Step::Kind::flip_x) rect.x = steps_.width - rect.right();
      if (steps_.items[j].kind == Step::Kind::flip_y) rect.y = steps_.height - rect.bottom();
    }
    const auto fill = [&]<class T>(T* data) {
      for (int c = 0; c < plan.conversion->channels; c++, data += plane) {
        const T value = static_cast<T>(
            plan.erasures[static_cast<size_t>(step.erasure)][static_cast<size_t>(c)]);
        for (int y = rect.y; y < rect.bottom(); y++)
          std::fill_n(data + int64_t{y} * steps_.width + rect.x, rect.width, value);
      }
    };
    switch (plan.conversion->format) {
      case PixelFormat::f32_chw: fill(static_cast<uint32_t*>(out)); break;
      case PixelFormat::u16_chw: fill(static_cast<uint16_t*>(out)); break;
      default: fill(static_cast<uint8_t*>(out));
    }
  }
}

// From the source region to the tensor. `view` lies in image_, spare_ or both in turn; kRowSlack
// bytes follow its last row.
Status Executor::finish(const Plan& plan, View view, void* out) {
  const auto end_of = [](const View& v) {
    return v.pixels + (v.rect.height - 1) * v.stride + static_cast<ptrdiff_t>(v.rect.width) * 3 +
           kRowSlack;
  };
  Output output;
  output.conversion = plan.conversion.get();
  output.data = out;
  output.stride = static_cast<ptrdiff_t>(steps_.width) * plan.conversion->channels;
  output.width = steps_.width;
  output.height = steps_.height;
  bool flip_x = false;
  for (int i = last_ + 1; i < steps_.count; i++) {
    const Step::Kind kind = steps_.items[i].kind;
    flip_x ^= kind == Step::Kind::flip_x;
    output.flip_y ^= kind == Step::Kind::flip_y;
    output.gray |= kind == Step::Kind::gray;
  }
  for (int i = 0; i <= last_; i++) {
    const Step& step = steps_.items[i];
    // A flip is cheapest where the resize before it writes.
    const bool turned = step.kind == Step::Kind::resize && i < last_ &&
                        steps_.items[i + 1].kind == Step::Kind::flip_x;
    const Rect& wanted = regions_[i + 1];
    if (step.kind == Step::Kind::crop && inside(step, widths_[i], heights_[i])) {
      view.rect.x -= step.x;
      view.rect.y -= step.y;
      continue;
    }
    // The pixels are ours: every path here has copied or decoded them into scratch.
    if (is_colour(step.kind)) {
      apply_colour(level_, step, view, wanted);
      view.pixels += (wanted.y - view.rect.y) * view.stride +
                     static_cast<ptrdiff_t>(wanted.x - view.rect.x) * 3;
      view.rect = wanted;
      continue;
    }
    if (step.kind == Step::Kind::gray) {
      apply_gray(const_cast<uint8_t*>(view.pixels), view.stride, view.rect.width, view.rect.height);
      continue;
    }
    if (step.kind == Step::Kind::resize) {
      if (prepared_ != i) {
        Resize resize{widths_[i], heights_[i], step.width, step.height, wanted};
        resize.filter = step.filter;
        resize.order = plan.order;
        resize.flip_x = turned || (i == last_ && flip_x);
        resampler_.prepare(resize);
        prepared_ = i;
      }
      if (i == last_) {
        resampler_.run(view.pixels, view.stride, end_of(view), output);
        erase(plan, out);
        return Status::ok;
      }
    }
    uint8_t* target = spare_.need(image_bytes(wanted));
    switch (step.kind) {
      case Step::Kind::crop: apply_crop(view, step, wanted, target); break;
      case Step::Kind::pad: apply_pad(view, step, widths_[i], heights_[i], wanted, target); break;
      case Step::Kind::flip_x: apply_flip_x(view, target); break;
      case Step::Kind::flip_y: apply_flip_y(view, target); break;
      case Step::Kind::transpose: apply_transpose(view, target); break;
      case Step::Kind::affine: apply_affine(level_, view, step, wanted, target); break;
      case Step::Kind::perspective: apply_perspective(view, step, wanted, target); break;
      case Step::Kind::sharpness:
        apply_sharpness(level_, view, step, widths_[i], heights_[i], wanted, target);
        break;
      default: {
        Conversion bytes;
        Output intermediate;
        intermediate.conversion = &bytes;
        intermediate.data = target;
        intermediate.width = wanted.width;
        intermediate.height = wanted.height;
        intermediate.stride = static_cast<ptrdiff_t>(wanted.width) * 3;
        resampler_.run(view.pixels, view.stride, end_of(view), intermediate);
      }
    }
    if (turned) i++;
    view = {target, static_cast<ptrdiff_t>(wanted.width) * 3, regions_[i + 1]};
    image_.swap(spare_);
  }
  uint8_t* line = line_.need(static_cast<size_t>(steps_.width) * 3 + 2 * kRowSlack);
  convert_rows(level_, view.pixels, view.stride, 0, steps_.height, flip_x, line, output);
  erase(plan, out);
  return Status::ok;
}

Status Executor::run_encoded(const Plan& plan, const jpeg::Limits& limits, const uint8_t* data,
                             size_t size, uint32_t key, int height, int width, void* out) {
  try {
    Status status = decoder_.open(data, size, limits);
    if (status != Status::ok) return status;
    const jpeg::Header& header = decoder_.header();
    status = geometry(plan, header.height, header.width, key, height, width);
    if (status != Status::ok) return status;
    const Rect& region = regions_[0];
    const ptrdiff_t stride = static_cast<ptrdiff_t>(region.width) * 3;
    uint8_t* pixels = image_.need(image_bytes(region));
    status = decoder_.decode(region, pixels, stride);
    if (status != Status::ok) return status;
    return finish(plan, {pixels, stride, region}, out);
  } catch (const std::bad_alloc&) {
    return Status::out_of_memory;
  }
}

Status Executor::size(const jpeg::Limits& limits, const uint8_t* data, size_t size, int& height,
                      int& width) {
  const Status status = decoder_.open(data, size, limits);
  height = decoder_.header().height;
  width = decoder_.header().width;
  return status;
}

Status Executor::run_pixels(const Plan& plan, const uint8_t* pixels, ptrdiff_t stride,
                            int image_height, int image_width, uint32_t key, int height, int width,
                            void* out) {
  try {
    const Status status = geometry(plan, image_height, image_width, key, height, width);
    if (status != Status::ok) return status;
    const Rect& region = regions_[0];
    const ptrdiff_t row = static_cast<ptrdiff_t>(region.width) * 3;
    uint8_t* copy = image_.need(image_bytes(region));
    for (int y = 0; y < region.height; y++)
      std::memcpy(copy + y * row,
                  pixels + (region.y + y) * stride + static_cast<ptrdiff_t>(region.x) * 3,
                  static_cast<size_t>(row));
    return finish(plan, {copy, row, region}, out);
  } catch (const std::bad_alloc&) {
    return Status::out_of_memory;
  }
}

}  // namespace stoker
