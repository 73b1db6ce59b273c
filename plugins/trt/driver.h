// The CUDA driver API, as much as a launcher needs, found by dlopen: the plugin loads on machines without a driver and
// is tied to no CUDA version. Types and numbers are those of the driver's stable ABI (cuda.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace sparsedeploy {
namespace cuda {

using Result = int;
using Device = int;
using Address = uint64_t;
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Stream = struct StreamTag*;

constexpr Result kSuccess = 0;
constexpr int kDeviceMajor = 75, kDeviceMinor = 76;
constexpr int kFunctionDynamicShared = 8, kFunctionWideCluster = 14;
constexpr int kJitErrorLog = 5, kJitErrorLogSize = 6;
constexpr int kLaunchCluster = 4, kLaunchDependent = 6;

/// CUlaunchAttribute.
struct LaunchAttribute {
    int id;
    char pad[4];
    union {
        char pad[64];
        unsigned cluster[3];
        int flag;
    } value;
};

/// CUlaunchConfig.
struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned sharedBytes;
    Stream stream;
    LaunchAttribute* attributes;
    unsigned count;
};

struct Driver {
    Result (*init)(unsigned);
    Result (*errorString)(Result, char const**);
    Result (*currentContext)(Context*);
    /// Null before CUDA 12: contexts are then told apart by address only.
    Result (*contextId)(Context, unsigned long long*);
    Result (*currentDevice)(Device*);
    Result (*pushContext)(Context);
    Result (*popContext)(Context*);
    Result (*deviceAttribute)(int*, int, Device);
    Result (*loadModule)(Module*, void const*, unsigned, int*, void**);
    Result (*unloadModule)(Module);
    Result (*function)(Function*, Module, char const*);
    Result (*setAttribute)(Function, int, int);
    /// Null before CUDA 12.4. Loads what lazy loading would leave to the first launch.
    Result (*loadFunction)(Function);
    Result (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**,
                     void**);
    /// Null before CUDA 11.8.
    Result (*launchEx)(LaunchConfig const*, Function, void**, void**);
    Result (*memset8)(Address, unsigned char, std::size_t, Stream);
};

/// The process's driver; Error when there is none. Looked for again at each call until it is found.
Driver const& driver();

/// Error with the driver's words unless `result` is success.
void check(Driver const& driver, Result result, std::string const& what);

}  // namespace cuda
}  // namespace sparsedeploy
