// SPDX-License-Identifier: Apache-2.0
// Which build of the kernels runs. ROCKETKV_CPU_ISA names one; by default it is the best that the processor has.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace rocketkv {

namespace portable {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512bf16 {
extern const Kernels kKernels;
}
#endif

namespace {

struct Isa {
  const char* name;
  const Kernels* kernels;
};

struct Isas {
  Isa usable[4];
  int count = 0;
  int active = 0;

  Isas() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (has_avx512 && __builtin_cpu_supports("avx512bf16")) Add("avx512bf16", &avx512bf16::kKernels);
    if (has_avx512) Add("avx512", &avx512::kKernels);
    if (has_avx2) Add("avx2", &avx2::kKernels);
#endif
    Add("portable", &portable::kKernels);
    const char* wish = std::getenv("ROCKETKV_CPU_ISA");
    if (wish != nullptr) Set(wish);
  }

  void Add(const char* name, const Kernels* kernels) { usable[count++] = {name, kernels}; }
  bool Set(const char* name) {
    for (int i = 0; i < count; ++i) {
      if (std::strcmp(usable[i].name, name) == 0) {
        active = i;
        return true;
      }
    }
    return false;
  }
};

Isas& TheIsas() {
  static Isas isas;
  return isas;
}

}  // namespace

const Kernels& kernels() { return *TheIsas().usable[TheIsas().active].kernels; }
int NumIsas() { return TheIsas().count; }
const char* IsaName(int index) { return TheIsas().usable[index].name; }
bool SetIsa(const char* name) { return TheIsas().Set(name); }
const char* ActiveIsa() { return TheIsas().usable[TheIsas().active].name; }

}  // namespace rocketkv
