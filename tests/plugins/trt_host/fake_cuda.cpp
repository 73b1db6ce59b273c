// libcuda.so.1 without a GPU: writes each call as one line of JSON to $FAKE_CUDA_LOG (no line where that is unset).
// An image is text, `entry bytes bytes ...` per line: the entries in it, and the sizes of their parameters.
// $FAKE_CUDA_CAPABILITY is the device's compute capability times ten. The current context is the thread's own.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

struct Entry {
    std::string name;
    std::vector<int> sizes;
};
struct Module {
    std::vector<Entry*> entries;
};

thread_local void* current = nullptr;
std::atomic<int> loaded{0}, launched{0};

// On the stack and straight to the file: the host counts allocations around enqueue.
void say(char const* format, ...) {
    static int const file =
        std::getenv("FAKE_CUDA_LOG") ? open(std::getenv("FAKE_CUDA_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0644) : -1;
    if (file < 0) return;
    char line[2048];
    va_list arguments;
    va_start(arguments, format);
    int const length = std::vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    if (write(file, line, static_cast<std::size_t>(length)) != length) std::abort();
}

int launch(Entry const& entry, unsigned const* grid, unsigned const* block, unsigned shared, void* stream,
           unsigned cluster, int dependent, void** params) {
    launched.fetch_add(1);
    if (!std::getenv("FAKE_CUDA_LOG")) return 0;  // when the launcher's own time is taken
    char args[1024] = "";
    int at = 0;
    for (std::size_t i = 0; i < entry.sizes.size(); ++i) {
        unsigned long long value = 0;
        std::memcpy(&value, params[i], static_cast<std::size_t>(entry.sizes[i]));
        at += std::snprintf(args + at, sizeof(args) - static_cast<std::size_t>(at), "%s%llu", i ? ", " : "", value);
    }
    say("{\"call\": \"launch\", \"entry\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, "
        "\"stream\": %llu, \"cluster\": %u, \"dependent\": %d, \"args\": [%s]}\n",
        entry.name.c_str(), grid[0], grid[1], grid[2], block[0], block[1], block[2], shared,
        reinterpret_cast<unsigned long long>(stream), cluster, dependent, args);
    return 0;
}

int unwanted(char const* name) {
    say("{\"call\": \"unwanted\", \"name\": \"%s\"}\n", name);
    return 0;
}

}  // namespace

API int cuInit(unsigned) { return 0; }
API int cuGetErrorString(int error, char const** words) {
    *words = error == 218 ? "a PTX JIT compilation failed" : error == 500 ? "named symbol not found" : "invalid value";
    return 0;
}
API int cuCtxGetCurrent(void** context) {
    *context = current;
    return 0;
}
API int cuCtxGetDevice(int* device) {
    *device = 0;
    return current ? 0 : 201;
}
API int cuCtxPushCurrent_v2(void*) { return 0; }
API int cuCtxPopCurrent_v2(void**) { return 0; }
API int cuDeviceGetAttribute(int* value, int attribute, int) {
    char const* const text = std::getenv("FAKE_CUDA_CAPABILITY");
    int const capability = text ? std::atoi(text) : 90;
    *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : 0;
    return 0;
}
API int cuModuleLoadDataEx(void** module, void const* image, unsigned count, int* options, void** values) {
    std::string const text(static_cast<char const*>(image));
    if (text.compare(0, 4, "bad ") == 0) {
        for (unsigned i = 0; i < count; ++i) {
            if (options[i] == 5) std::strcpy(static_cast<char*>(values[i]), "ptxas: unknown opcode\n");
        }
        return 218;
    }
    auto* const made = new Module();
    for (std::size_t from = 0; from < text.size();) {
        std::size_t const end = std::min(text.find('\n', from), text.size());
        auto* const entry = new Entry();
        char name[64];
        int used = 0;
        std::string const line = text.substr(from, end - from);
        if (std::sscanf(line.c_str(), "%63s%n", name, &used) == 1) entry->name = name;
        for (int size, more; std::sscanf(line.c_str() + used, "%d%n", &size, &more) == 1; used += more) {
            entry->sizes.push_back(size);
        }
        made->entries.push_back(entry);
        from = end + 1;
    }
    *module = made;
    loaded.fetch_add(1);
    say("{\"call\": \"load\", \"context\": %llu, \"image\": \"%s\"}\n", reinterpret_cast<unsigned long long>(current),
        made->entries.empty() ? "" : made->entries[0]->name.c_str());
    return 0;
}
API int cuModuleUnload(void*) {
    loaded.fetch_sub(1);
    say("{\"call\": \"unload\"}\n");
    return 0;
}
API int cuModuleGetFunction(void** function, void* module, char const* name) {
    for (Entry* entry : static_cast<Module*>(module)->entries) {
        if (entry->name == name) {
            *function = entry;
            say("{\"call\": \"function\", \"entry\": \"%s\"}\n", name);
            return 0;
        }
    }
    return 500;
}
API int cuFuncSetAttribute(void* function, int attribute, int value) {
    say("{\"call\": \"attribute\", \"entry\": \"%s\", \"attribute\": %d, \"value\": %d}\n",
        static_cast<Entry*>(function)->name.c_str(), attribute, value);
    return 0;
}
API int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, void* stream, void** params, void**) {
    unsigned const grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    return launch(*static_cast<Entry*>(function), grid, block, shared, stream, 1, 0, params);
}
API int cuMemsetD8Async(unsigned long long address, unsigned char value, std::size_t size, void* stream) {
    say("{\"call\": \"memset\", \"address\": %llu, \"value\": %d, \"bytes\": %zu, \"stream\": %llu}\n", address, value,
        size, reinterpret_cast<unsigned long long>(stream));
    return 0;
}

struct Attribute {
    int id;
    char pad[4];
    unsigned value[16];
};
struct Config {
    unsigned grid[3], block[3], shared;
    void* stream;
    Attribute* attributes;
    unsigned count;
};
API int cuLaunchKernelEx(Config const* config, void* function, void** params, void**) {
    unsigned cluster = 1;
    int dependent = 0;
    for (unsigned i = 0; i < config->count; ++i) {
        if (config->attributes[i].id == 4) cluster = config->attributes[i].value[0];
        if (config->attributes[i].id == 6) dependent = static_cast<int>(config->attributes[i].value[0]);
    }
    return launch(*static_cast<Entry*>(function), config->grid, config->block, config->shared, config->stream, cluster,
                  dependent, params);
}

// What a launcher has no business with.
API int cuMemAlloc_v2(void*, std::size_t) { return unwanted("cuMemAlloc"); }
API int cuMemFree_v2(unsigned long long) { return unwanted("cuMemFree"); }
API int cuStreamSynchronize(void*) { return unwanted("cuStreamSynchronize"); }
API int cuCtxSynchronize() { return unwanted("cuCtxSynchronize"); }
API int cuMemcpyHtoD_v2(unsigned long long, void const*, std::size_t) { return unwanted("cuMemcpyHtoD"); }

// For the host only.
API void fakeSetCurrent(void* context) { current = context; }
API int fakeLoaded() { return loaded.load(); }
API int fakeLaunched() { return launched.load(); }
