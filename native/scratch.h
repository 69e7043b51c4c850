// Memory that a thread keeps between calls, so that a step allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace forerun {

// Grows, never shrinks. What get() gave is void after the next get() of the same object.
template <class Value>
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  ~Scratch() { release(); }

  Value* get(std::int64_t count) {
    if (count > size_) {
      release();
      data_ = nullptr;
      size_ = 0;
      data_ = static_cast<Value*>(::operator new(static_cast<std::size_t>(count) * sizeof(Value), align));
      size_ = count;
    }
    return data_;
  }

 private:
  static constexpr auto align = std::align_val_t{64};

  void release() { ::operator delete(data_, align); }

  Value* data_ = nullptr;
  std::int64_t size_ = 0;
};

}  // namespace forerun
