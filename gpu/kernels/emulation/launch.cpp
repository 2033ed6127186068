// launch.cpp - hands the blocks of a grid to multiprocessors; the emulator's one entry point.
#include <cstdio>
#include <cstring>
#include <numeric>
#include <thread>

#include "machine.h"

namespace emu {

void Launch::report(const std::string& message) {
  const std::lock_guard<std::mutex> guard(mutex);
  if (error.empty()) error = message;
}

namespace {

// Multiprocessors between launches: their stacks are mapped once.
std::mutex idle_mutex;
std::vector<std::unique_ptr<Multiprocessor>> idle;

std::unique_ptr<Multiprocessor> take_multiprocessor() {
  const std::lock_guard<std::mutex> guard(idle_mutex);
  if (idle.empty() || THREAD_SANITIZER) return std::make_unique<Multiprocessor>();
  auto multiprocessor = std::move(idle.back());
  idle.pop_back();
  return multiprocessor;
}

void give_back(std::unique_ptr<Multiprocessor> multiprocessor) {
  if (THREAD_SANITIZER) return;  // the memory of its blocks goes with it
  const std::lock_guard<std::mutex> guard(idle_mutex);
  idle.push_back(std::move(multiprocessor));
}

std::vector<uint64_t> order_of_blocks(const Launch& launch) {
  const uint64_t num_blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  std::vector<uint64_t> blocks(num_blocks);
  std::iota(blocks.begin(), blocks.end(), uint64_t{0});
  if (launch.order == Order::reverse) return {blocks.rbegin(), blocks.rend()};
  if (launch.order == Order::random) {
    Random random(launch.seed);
    for (uint64_t i = num_blocks; i > 1; i--) std::swap(blocks[i - 1], blocks[random.next() % i]);
  }
  return blocks;
}

void run(Launch& launch, int num_workers) {
  const std::vector<uint64_t> blocks = order_of_blocks(launch);
  std::atomic<size_t> next{0};
  auto work = [&] {
    auto multiprocessor = take_multiprocessor();
    for (size_t i; !launch.failed && (i = next++) < blocks.size();)
      multiprocessor->run_block(launch, blocks[i]);
    acquire(&launch);
    give_back(std::move(multiprocessor));
  };
  std::vector<std::thread> workers;
  for (int i = 1; i < num_workers; i++) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
}

}  // namespace
}  // namespace emu

// Runs `kernel` with `parameters` over a grid. `order` is emu::Order, `seed` goes with it; `rough`
// is not 0 for rough arithmetic.
// Returns 0 and the extra passes of ldmatrix over shared memory in *bank_conflicts, or -1 and what
// went wrong in `message`.
extern "C" int emu_launch(void (*kernel)(const void*), const void* parameters, const unsigned* grid,
                          const unsigned* block, size_t shared_bytes, int order, uint64_t seed,
                          int rough, int num_workers, uint64_t* bank_conflicts, char* message,
                          size_t message_bytes) {
  emu::Launch launch;
  launch.kernel = kernel;
  launch.parameters = parameters;
  launch.grid = {grid[0], grid[1], grid[2]};
  launch.block = {block[0], block[1], block[2]};
  launch.shared_bytes = shared_bytes;
  launch.order = static_cast<emu::Order>(order);
  launch.seed = seed;
  launch.rough = rough;
  const uint64_t num_threads = uint64_t{block[0]} * block[1] * block[2];
  if (shared_bytes > emu::MAX_SHARED_BYTES) {
    launch.failed = true;
    launch.report(std::to_string(shared_bytes) + " bytes of shared memory, of at most " +
                  std::to_string(emu::MAX_SHARED_BYTES));
  } else if (num_threads < 1 || num_threads > emu::MAX_THREADS) {
    launch.failed = true;
    launch.report(std::to_string(num_threads) + " threads in a block, of at most " +
                  std::to_string(emu::MAX_THREADS));
  } else if (grid[1] > 65535 || grid[2] > 65535 || grid[0] > 0x7fffffffu) {
    launch.failed = true;
    launch.report("the grid is larger than 2147483647 x 65535 x 65535");
  } else {
    emu::run(launch, num_workers);
  }
  *bank_conflicts = launch.bank_conflicts;
  std::snprintf(message, message_bytes, "%s", launch.error.c_str());
  return launch.failed ? -1 : 0;
}
