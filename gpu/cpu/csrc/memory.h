// Memory that is taken piece by piece and given back all at once.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <vector>

#include "isa.h"

namespace trioserve::TRIOSERVE_ISA {

// Whether the kernel is asked for large pages: for what is read from end to end, or fills from its
// beginning on, as the cache does. A process with a gigabyte of small pages takes 100 ms to end when it is
// killed, and only then is its loss noticed. What is touched here and there would take more memory with
// large pages than it needs.
enum class Pages { kSmall, kLarge };

// Zeros, which take memory as they are touched. Pieces begin at multiples of 64 bytes.
class Memory {
 public:
  explicit Memory(Pages pages) : pages_(pages) {}
  ~Memory() {
    for (const Chunk& chunk : chunks_) munmap(chunk.begin, chunk.size);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Throws std::bad_alloc.
  template <typename T>
  T* take(size_t count) {
    return static_cast<T*>(take_bytes(count * sizeof(T)));
  }

  void* take_bytes(size_t bytes) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (bytes > left_) grow(bytes);
    std::byte* piece = next_;
    next_ += bytes;
    left_ -= bytes;
    return piece;
  }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kChunk = size_t{64} << 20;

  struct Chunk {
    void* begin;
    size_t size;
  };

  void grow(size_t bytes) {
    const size_t size = std::max(bytes, kChunk);
    void* begin = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) throw std::bad_alloc();
    madvise(begin, size, pages_ == Pages::kLarge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    chunks_.push_back({begin, size});
    next_ = static_cast<std::byte*>(begin);
    left_ = size;
  }

  const Pages pages_;
  std::vector<Chunk> chunks_;
  std::byte* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace trioserve::TRIOSERVE_ISA
