// memory.cpp - shared memory and asynchronous copies.
#include <sys/mman.h>

#include <cstring>

#include "machine.h"

namespace emu {
namespace {

constexpr size_t ALIGNMENT = 128;
constexpr int POISON = 0xFF;
// Behind every static array; a store a little past its end falls here.
constexpr size_t GAP_BYTES = 128;

constexpr size_t round_up(size_t size, size_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

constexpr size_t TAG_BYTES = 128;  // see SharedMemory::tag
constexpr size_t STATIC_BYTES = round_up(TAG_BYTES + MAX_STATIC_SHARED_BYTES + 64 * 2 * ALIGNMENT,
                                         PAGE_BYTES);
constexpr size_t DYNAMIC_BYTES = round_up(MAX_SHARED_BYTES + ALIGNMENT, PAGE_BYTES);
constexpr size_t MAPPED_BYTES = STATIC_BYTES + DYNAMIC_BYTES + PAGE_BYTES;

}  // namespace

SharedMemory::SharedMemory() { map(); }

SharedMemory::~SharedMemory() {
  for (char* memory : retired_) munmap(memory, MAPPED_BYTES);
  munmap(memory_, MAPPED_BYTES);
}

void SharedMemory::map() {
  memory_ = static_cast<char*>(map_pages(MAPPED_BYTES));
  protect_page(memory_ + STATIC_BYTES + DYNAMIC_BYTES);
}

void SharedMemory::begin_block(size_t dynamic_bytes) {
  dynamic_bytes_ = dynamic_bytes;
  // Flush with the inaccessible page, as far as the alignment allows.
  dynamic_ = memory_ + STATIC_BYTES + DYNAMIC_BYTES - round_up(dynamic_bytes, ALIGNMENT);
  num_arrays_ = 0;
  static_bytes_ = 0;
  next_ = memory_ + TAG_BYTES;
  allow(memory_, STATIC_BYTES + DYNAMIC_BYTES);
  std::memset(memory_, POISON, STATIC_BYTES);
  std::memset(dynamic_, POISON, round_up(dynamic_bytes, ALIGNMENT));
  forbid(memory_, STATIC_BYTES + DYNAMIC_BYTES);
  allow(dynamic_, dynamic_bytes);
}

void* SharedMemory::array(int site, size_t num_bytes) {
  for (const Array& array : arrays_) {
    if (&array == arrays_ + num_arrays_) break;
    if (array.site == site) return array.address;
  }
  if (num_arrays_ == MAX_ARRAYS) fail("more than %d static shared arrays", MAX_ARRAYS);
  static_bytes_ += num_bytes;
  if (static_bytes_ > MAX_STATIC_SHARED_BYTES)
    fail("%zu bytes of static shared memory, of at most %zu", static_bytes_,
         MAX_STATIC_SHARED_BYTES);
  if (static_bytes_ + dynamic_bytes_ > MAX_SHARED_BYTES)
    fail("%zu bytes of shared memory, of at most %zu", static_bytes_ + dynamic_bytes_,
         MAX_SHARED_BYTES);
  char* address = next_;
  next_ += round_up(num_bytes + GAP_BYTES, ALIGNMENT);
  allow(address, num_bytes);
  arrays_[num_arrays_++] = {site, num_bytes, address};
  return address;
}

bool SharedMemory::written(const char* begin, const char* end) const {
  for (const char* byte = begin; byte < end; byte++)
    if (*byte != static_cast<char>(POISON)) return true;
  return false;
}

const char* SharedMemory::end_block() {
  const char* wrong = nullptr;
  allow(memory_, STATIC_BYTES + DYNAMIC_BYTES);
  for (int i = 0; i < num_arrays_; i++) {
    const char* end = arrays_[i].address + arrays_[i].num_bytes;
    if (written(end, end + GAP_BYTES))
      wrong = "a thread wrote past the end of a static shared array";
  }
  if (written(dynamic_ + dynamic_bytes_, memory_ + STATIC_BYTES + DYNAMIC_BYTES))
    wrong = "a thread wrote past the end of dynamic shared memory";
  if (THREAD_SANITIZER) {
    // Blocks are unordered, and the sanitizer should see that: each has memory of its own.
    retired_.push_back(memory_);
    map();
  }
  return wrong;
}

void* shared_array(int site, size_t num_bytes) { return here->shared.array(site, num_bytes); }

void* dynamic_shared() { return here->shared.dynamic(); }

bool copy_lands_now(void* to, const void* from) {
  CopyQueue& queue = here->self().copies;
  if (here->random.coin()) return true;
  if (queue.tail - queue.head == CopyQueue::CAPACITY)
    fail("more than %u asynchronous copies in flight", CopyQueue::CAPACITY);
  queue.copies[queue.tail++ % CopyQueue::CAPACITY] = {to, from, queue.group};
  return false;
}

void close_copy_group() { here->self().copies.group++; }

bool next_finished_copy(int num_kept, Copy* copy) {
  CopyQueue& queue = here->self().copies;
  if (queue.head == queue.tail) return false;
  const Copy& oldest = queue.copies[queue.head % CopyQueue::CAPACITY];
  if (oldest.group >= queue.group - num_kept) return false;
  *copy = oldest;
  queue.head++;
  return true;
}

}  // namespace emu
