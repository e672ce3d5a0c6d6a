/* Test double for the CUDA side of one exported CuTe DSL object, linked into that object's library with hidden symbols.
 *
 * It runs nothing on a GPU: it keeps kernel names, asks Python for attributes, and hands every launch to Python. The GPU
 * image that the object holds is never looked at. Not shipped with tsmla, and no replacement for NVIDIA's runtime:
 * a library that has this inside can only be emulated.
 */
#include <stddef.h>
#include <stdint.h>

typedef struct {
  uint32_t grid[3], block[3];
  uint64_t shared_bytes;
  void *stream;
  const void *attributes;
  uint32_t attribute_count;
} LaunchConfig;

typedef struct {
  int data_type;
  uint32_t rank;
  const void *address;
  const uint64_t *sizes, *strides;
  const uint32_t *box, *element_strides;
  int interleave, swizzle, promotion, fill;
} TensorMapCall;

typedef struct {
  int (*device_attribute)(int attribute, int *value);
  int (*kernel_attribute)(const char *kernel, int attribute, int *value);
  int (*set_kernel_attribute)(const char *kernel, int attribute, int value);
  int (*launch)(const LaunchConfig *config, const char *kernel, void **arguments);
  int (*encode_tensor_map)(const TensorMapCall *call, void *map);
} Host;

typedef void (*RaiseText)(const char *kind, const char *text);
typedef void (*RaiseParts)(const char *kind, const char **parts, int count);

enum { REFUSED = 999, RAISED = -1, DEVICES = 1 };

static Host host;
static int library; /* its address is the handle of the loaded image */

__attribute__((visibility("default"))) void tsmla_emulator_connect(const Host *connected) { host = *connected; }

static int connected(void) { return host.launch != NULL; }

int _cudaGetDevice(int *device) {
  *device = 0;
  return 0;
}

int _cudaSetDevice(int device) { return device >= 0 && device < DEVICES ? 0 : REFUSED; }

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  return host.device_attribute(attribute, value);
}

int _cudaLibraryLoadData(void **loaded, const void *image, int *jit_options, void **jit_values, unsigned jit_count,
                         int *options, void **values, unsigned count) {
  (void)image, (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
  *loaded = &library;
  return 0;
}

/* A kernel's handle is its name, copied: the caller's may lie on its stack. */
int _cudaLibraryGetKernel(const char **kernel, void *from, const char *name) {
  static char names[1 << 16];
  static size_t used;
  size_t length = 0;
  while (name[length])
    ++length;
  if (from != &library || used + length + 1 > sizeof names)
    return REFUSED;
  for (size_t i = 0; i <= length; ++i)
    names[used + i] = name[i];
  *kernel = names + used;
  used += length + 1;
  return 0;
}

int _cuKernelGetAttribute(int *value, int attribute, const char *kernel, int device) {
  (void)device;
  return host.kernel_attribute(kernel, attribute, value);
}

int _cudaFuncSetAttribute(const char *kernel, int attribute, int value) {
  return host.set_kernel_attribute(kernel, attribute, value);
}

int _cudaKernelSetAttributeForDevice(const char *kernel, int attribute, int value, int device) {
  (void)device;
  return host.set_kernel_attribute(kernel, attribute, value);
}

int _cudaLaunchKernelEx(const LaunchConfig *config, const char *kernel, void **arguments) {
  return host.launch(config, kernel, arguments);
}

/* Most functions write their tensor maps themselves. */
int _cuTensorMapEncodeTiled(void *map, int data_type, uint32_t rank, const void *address, const uint64_t *sizes,
                            const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                            int interleave, int swizzle, int promotion, int fill) {
  TensorMapCall call = {data_type, rank, address, sizes, strides, box, element_strides,
                        interleave, swizzle, promotion, fill};
  return host.encode_tensor_map(&call, map);
}

/* NVIDIA's ends the process. Python knows of the error, and raises it when the function returns. */
void cuda_dialect_assert_success(int error) { (void)error; }

/* Called on every call of the exported function. A load that failed is tried again by the next call. */
int cuda_dialect_init_library_once(void **state, int (*load)(void **), int (*load_to_device)(void **, int),
                                   RaiseText raise) {
  if (*state)
    return 0;
  if (!connected()) {
    raise("RuntimeError", "this library was linked for emulation: call it through tsmla_emulator");
    return RAISED;
  }
  int failed = load(state);
  for (int device = 0; !failed && device < DEVICES; ++device)
    failed = load_to_device(state, device);
  if (failed) {
    *state = NULL;
    raise("RuntimeError", "the emulated device refused to load the kernels");
    return RAISED;
  }
  return 0;
}

void cuda_dialect_unload_library_once(void **state) { *state = NULL; }

void CuteDSLRT_TVMFFISetRaisedCudaError(RaiseParts raise, int error) {
  (void)error;
  const char *text[] = {"the emulated device refused the launch"};
  raise("RuntimeError", text, 1);
}
