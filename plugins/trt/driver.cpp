#include "driver.h"

#include <dlfcn.h>

#include <mutex>

#include "plan.h"

namespace sparsedeploy {
namespace cuda {

namespace {

template <typename Function>
bool find(void* library, char const* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

Driver* open() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        throw Error(
            "no CUDA driver: libcuda.so.1 cannot be loaded on this machine. Running the kernels needs an NVIDIA GPU "
            "and its driver; check with nvidia-smi, in a container start it with the GPU passed in.");
    }
    Driver found{};
    bool const complete =
        find(library, "cuInit", found.init) && find(library, "cuGetErrorString", found.errorString) &&
        find(library, "cuCtxGetCurrent", found.currentContext) &&
        find(library, "cuCtxGetDevice", found.currentDevice) &&
        find(library, "cuCtxPushCurrent_v2", found.pushContext) &&
        find(library, "cuCtxPopCurrent_v2", found.popContext) &&
        find(library, "cuDeviceGetAttribute", found.deviceAttribute) &&
        find(library, "cuModuleLoadDataEx", found.loadModule) && find(library, "cuModuleUnload", found.unloadModule) &&
        find(library, "cuModuleGetFunction", found.function) &&
        find(library, "cuFuncSetAttribute", found.setAttribute) && find(library, "cuLaunchKernel", found.launch) &&
        find(library, "cuMemsetD8Async", found.memset8);
    if (!complete) throw Error("the CUDA driver (libcuda.so.1) is too old: it lacks functions of CUDA 9.0. Update it.");
    find(library, "cuCtxGetId", found.contextId);
    find(library, "cuFuncLoad", found.loadFunction);
    find(library, "cuLaunchKernelEx", found.launchEx);
    check(found, found.init(0), "starting the CUDA driver (nvidia-smi shows what it finds)");
    // Neither freed nor closed: modules may be unloaded after static destructors have run.
    return new Driver(found);
}

}  // namespace

Driver const& driver() {
    static std::mutex mutex;
    static Driver* opened = nullptr;
    std::lock_guard<std::mutex> const lock(mutex);
    if (!opened) opened = open();
    return *opened;
}

void check(Driver const& driver, Result result, std::string const& what) {
    if (result == kSuccess) return;
    char const* words = nullptr;
    driver.errorString(result, &words);
    throw Error(what + " failed: " + (words ? words : "unknown error") + " (CUDA error " + std::to_string(result) +
                ").");
}

}  // namespace cuda
}  // namespace sparsedeploy
