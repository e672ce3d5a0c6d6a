// What the microbenchmarks share: clocks, error checks, and one JSON line for each number.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

using u32 = uint32_t;
using u64 = uint64_t;

#define CHECK(call)                                                                             \
  do {                                                                                          \
    cudaError_t error_ = (call);                                                                \
    if (error_ != cudaSuccess) {                                                                \
      std::fprintf(stderr, "%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                             \
    }                                                                                           \
  } while (0)

__device__ inline u64 clock_now() {
  u64 t;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
  return t;
}

__device__ inline u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
  return t;
}

__device__ inline u32 sm_id() {
  u32 id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

__device__ inline u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

__device__ inline void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ inline void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ inline void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// One result, as a line of JSON.
inline void result(const std::string& name, double value, const char* unit) {
  std::printf("{\"name\": \"%s\", \"value\": %.4f, \"unit\": \"%s\"}\n", name.c_str(), value, unit);
  std::fflush(stdout);
}

// Device memory that holds `count` numbers, copied back after a run.
template <class T>
struct Numbers {
  T* device = nullptr;
  std::vector<T> host;
  explicit Numbers(size_t count) : host(count) { CHECK(cudaMalloc(&device, count * sizeof(T))); CHECK(cudaMemset(device, 0, count * sizeof(T))); }
  ~Numbers() { cudaFree(device); }
  const std::vector<T>& get() {
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}
