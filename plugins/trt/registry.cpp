// How TensorRT finds the plugin: registered when the library is loaded (by whatever loader), or handed over by
// getCreators. TensorRT is looked up at run time, so that the library loads without it and needs no file of it.
#include <dlfcn.h>

#include <cstdio>
#include <mutex>

#include "adapter.h"

#define SPARSEDEPLOY_EXPORT extern "C" __attribute__((visibility("default")))

namespace sparsedeploy {

/// ILoggerFinder, which the headers have since 8.6 only.
class LoggerFinder {
  public:
    virtual nvinfer1::ILogger* findLogger() = 0;

  protected:
    virtual ~LoggerFinder() = default;
};

namespace {

// TensorRT-RTX is built with the headers of TensorRT 10 but has a registry of another layout: it gets its own build,
// which never touches the registry.
#ifdef SPARSEDEPLOY_RTX
constexpr int32_t kMajor = 1;
constexpr bool kRegistersItself = false;
#else
constexpr int32_t kMajor = NV_TENSORRT_MAJOR;
constexpr bool kRegistersItself = true;
#endif

/// The library that is loaded when none is, then others with a registry: the runtimes for version-compatible engines.
std::vector<std::string> libraryNames(int32_t major) {
    if (major == 1) return {"libtensorrt_rtx.so.1"};
    std::string const end = ".so." + std::to_string(major);
    return {"libnvinfer" + end, "libnvinfer_lean" + end, "libnvinfer_dispatch" + end};
}

std::string productName(int32_t major) { return (major == 1 ? "TensorRT-RTX " : "TensorRT ") + std::to_string(major); }

/// getInferLibVersion says 8201 for 8.2.1, 101400 for 10.14.0, 10701 for TensorRT-RTX 1.7.1.
int32_t majorOf(int32_t version) { return version < 10000 ? version / 1000 : version / 10000; }

/// A TensorRT in this process.
struct Runtime {
    int32_t major = 0;
    nvinfer1::IPluginRegistry* (*registry)() = nullptr;
    nvinfer1::ILogger* (*logger)() = nullptr;
};

Runtime runtimeIn(void* library) {
    Runtime runtime;
    auto const version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
    if (!version) return runtime;
    runtime.major = majorOf(version());
    runtime.registry = reinterpret_cast<nvinfer1::IPluginRegistry* (*)()>(dlsym(library, "getPluginRegistry"));
    runtime.logger = reinterpret_cast<nvinfer1::ILogger* (*)()>(dlsym(library, "getLogger"));
    return runtime;
}

/// The TensorRT that this build is for, if the process has it; else the first other one; else major 0. `open` loads it.
Runtime findRuntime(bool open) {
    // Visible to all, then loaded privately (as Python does), then not loaded yet (as under LD_PRELOAD).
    Runtime found = runtimeIn(RTLD_DEFAULT);
    if (found.major == kMajor) return found;
    for (int32_t major : {kMajor, 11, 10, 8, 1}) {
        for (std::string const& name : libraryNames(major)) {
            void* const library = dlopen(name.c_str(), RTLD_NOLOAD | RTLD_NOW);
            Runtime const loaded = library ? runtimeIn(library) : Runtime{};
            if (loaded.major == kMajor) return loaded;
            if (found.major == 0) found = loaded;
        }
    }
    if (!open || found.major != 0) return found;
    void* const library = dlopen(libraryNames(kMajor)[0].c_str(), RTLD_NOW | RTLD_LOCAL);
    return library ? runtimeIn(library) : found;
}

std::mutex& mutex() {
    static std::mutex* const mutex = new std::mutex();
    return *mutex;
}
bool isRegistered = false;
LoggerFinder* loggerFinder = nullptr;

bool checkRuntime(Runtime const& runtime) {
    if (runtime.major == kMajor) return true;
    if (runtime.major != 0) {
        logError("SparseConv2d: this plugin was built for " + productName(kMajor) + ", the process runs " +
                 productName(runtime.major) + ": it is not registered, since its virtual calls would crash. Build it " +
                 "for that version (sparsedeploy build --plugin-only).");
    }
    return false;
}

bool registerItself() {
    std::lock_guard<std::mutex> const lock(mutex());
    if (isRegistered || !kRegistersItself) return isRegistered;
    Runtime const runtime = findRuntime(true);
    if (!checkRuntime(runtime) || !runtime.registry) return false;
    nvinfer1::IPluginRegistry* const registry = runtime.registry();
    isRegistered = registry && registry->registerCreator(creator(), kPluginNamespace);
    return isRegistered;
}

__attribute__((constructor)) void registerWhenLoaded() { registerItself(); }

/// The creators for a loader that registers them itself.
CreatorBase* const* handOver(int32_t& count) {
    static CreatorBase* const all[] = {&creator()};
    std::lock_guard<std::mutex> const lock(mutex());
    Runtime const runtime = findRuntime(false);
    count = runtime.major == 0 || checkRuntime(runtime) ? 1 : 0;
    if (isRegistered && runtime.registry) {
        // The caller owns the registration from here on; a second one under the same name would be refused.
        runtime.registry()->deregisterCreator(creator());
        isRegistered = false;
    }
    return all;
}

nvinfer1::ILogger* findLogger() {
    if (loggerFinder) return loggerFinder->findLogger();
    Runtime const runtime = findRuntime(false);
    return runtime.major == kMajor && runtime.logger ? runtime.logger() : nullptr;
}

}  // namespace

void logError(std::string const& words) {
    nvinfer1::ILogger* logger = nullptr;
    try {
        logger = findLogger();
    } catch (...) {
    }
    if (logger) {
        logger->log(nvinfer1::ILogger::Severity::kERROR, words.c_str());
    } else {
        std::fprintf(stderr, "%s\n", words.c_str());
    }
}

}  // namespace sparsedeploy

/// For programs that loaded this library before TensorRT: try again. Whether the plugin is registered.
SPARSEDEPLOY_EXPORT bool sparsedeployRegister() { return sparsedeploy::registerItself(); }

/// Called by TensorRT since 8.6 before it asks for the creators.
SPARSEDEPLOY_EXPORT void setLoggerFinder(sparsedeploy::LoggerFinder* finder) { sparsedeploy::loggerFinder = finder; }

#if SPARSEDEPLOY_ADAPTER == 3
SPARSEDEPLOY_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    return sparsedeploy::handOver(count);
}
#else
SPARSEDEPLOY_EXPORT nvinfer1::IPluginCreator* const* getPluginCreators(int32_t& count) {
    return sparsedeploy::handOver(count);
}
#endif
