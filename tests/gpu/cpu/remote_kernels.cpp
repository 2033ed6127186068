// Calls functions of the compiled kernels for another process, on an emulated processor perhaps.
//
// Usage: remote_kernels LIBRARY. Requests stand on standard input, one after the other: a letter, then
// numbers of 64 bits in this machine's order of bytes. Addresses are this process's own.
//
//   a size                   allocates memory at a multiple of 64; replies with its address
//   f address                frees it
//   w address size bytes     writes to memory
//   r address size           replies with the bytes there
//   c length name integers floats
//                            calls a function and replies with what it returns, as a number. Its integers
//                            and pointers are a count and so many numbers; its floats likewise, each in the
//                            lower half of a number. Both calling conventions pass them apart, whatever
//                            their order, and a function takes no notice of more than it has.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

using Numbers = std::vector<uint64_t>;
using Function = uint64_t (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                              uint64_t, uint64_t, uint64_t, uint64_t, float, float);
constexpr size_t kIntegers = 12, kFloats = 2;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "remote_kernels: %s\n", what);
  std::exit(1);
}

void read_bytes(void* to, size_t size) {
  if (std::fread(to, 1, size, stdin) != size) fail("a request ends too early");
}

void reply(const void* from, size_t size) {
  if (std::fwrite(from, 1, size, stdout) != size || std::fflush(stdout) != 0) fail("a reply can't be written");
}

uint64_t read_number() {
  uint64_t number;
  read_bytes(&number, sizeof number);
  return number;
}

void* read_address() { return reinterpret_cast<void*>(read_number()); }

Numbers read_numbers(size_t most) {
  Numbers numbers(read_number());
  if (numbers.size() > most) fail("a function has too many arguments");
  for (uint64_t& number : numbers) number = read_number();
  numbers.resize(most);
  return numbers;
}

float lower_half(uint64_t number) {
  const auto bits = static_cast<uint32_t>(number);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint64_t call(void* library) {
  std::string name(read_number(), '\0');
  read_bytes(name.data(), name.size());
  const Numbers x = read_numbers(kIntegers), floats = read_numbers(kFloats);
  const auto function = reinterpret_cast<Function>(dlsym(library, name.c_str()));
  if (function == nullptr) fail(("there is no function " + name).c_str());
  return function(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11],
                  lower_half(floats[0]), lower_half(floats[1]));
}

void serve(int request, void* library) {
  switch (request) {
    case 'a': {
      void* memory = nullptr;
      if (posix_memalign(&memory, 64, read_number()) != 0) fail("there is no memory");
      return reply(&memory, sizeof memory);
    }
    case 'f':
      return std::free(read_address());
    case 'w': {
      void* address = read_address();
      return read_bytes(address, read_number());
    }
    case 'r': {
      const void* address = read_address();
      return reply(address, read_number());
    }
    case 'c': {
      const uint64_t result = call(library);
      return reply(&result, sizeof result);
    }
    default:
      fail("a request is unknown");
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) fail("one argument is wanted: the library");
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(dlerror());
  for (int request; (request = std::getchar()) != EOF;) serve(request, library);
  return 0;
}
