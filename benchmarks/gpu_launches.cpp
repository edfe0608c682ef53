// Which kernels a library holds and which of them were launched, for benchmarks/gpu_sanitizer.py.
//
// Linked into a library of kernels, where the linker passes the CUDA runtime's calls on to the
// functions below (--wrap); device code is not touched. Lines go to the file $WINNOW_LAUNCHES:
// "has NAME" for each kernel as the library is loaded, "launched NAME" at its first launch.

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {

struct Kernel {
  std::string name;
  bool launched = false;
};

std::mutex mutex;

// By the host's function, and by the handle that the runtime gives for it.
std::unordered_map<const void*, Kernel>& kernels() {
  static std::unordered_map<const void*, Kernel> map;
  return map;
}

void write_line(const char* word, const std::string& name) {
  const char* path = std::getenv("WINNOW_LAUNCHES");
  const int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
  const std::string line = std::string(word) + " " + name + "\n";
  if (file < 0 || write(file, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    std::fprintf(stderr, "cannot write to $WINNOW_LAUNCHES\n");
    std::abort();
  }
  close(file);
}

void launched(const void* kernel) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = kernels().find(kernel);
  if (found == kernels().end()) {
    std::fprintf(stderr, "a kernel was launched that was not registered\n");
    std::abort();
  }
  if (!found->second.launched) write_line("launched", found->second.name);
  found->second.launched = true;
}

}  // namespace

#define FORWARDED(result, name, ...)      \
  extern "C" result __real_##name(__VA_ARGS__); \
  extern "C" result __wrap_##name(__VA_ARGS__)

FORWARDED(void, __cudaRegisterFunction, void** binary, const char* host, char* device,
          const char* name, int limit, uint3* thread, uint3* block, dim3* threads, dim3* blocks,
          int* warp) {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    kernels()[host] = Kernel{name};
    write_line("has", name);
  }
  __real___cudaRegisterFunction(binary, host, device, name, limit, thread, block, threads, blocks,
                                warp);
}

FORWARDED(cudaError_t, __cudaGetKernel, cudaKernel_t* handle, const void* host) {
  const cudaError_t error = __real___cudaGetKernel(handle, host);
  const std::lock_guard<std::mutex> lock(mutex);
  if (error == cudaSuccess) kernels()[*handle] = Kernel{kernels()[host].name};
  return error;
}

FORWARDED(cudaError_t, __cudaLaunchKernel, cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
          size_t shared, cudaStream_t stream) {
  launched(kernel);
  return __real___cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}

FORWARDED(cudaError_t, cudaLaunchKernelExC, const cudaLaunchConfig_t* config, const void* kernel,
          void** args) {
  launched(kernel);
  return __real_cudaLaunchKernelExC(config, kernel, args);
}
