// Loads libraries in the order and manner that programs do, and says what the plugin's creators then are.
// $LOADER_TENSORRT is the library with the registry, libnvinfer.so.10 if unset.
//   local <path> | global <path> | library <path> | unlibrary | register <path> | creators
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

#include "NvInferRuntime.h"

using namespace nvinfer1;

namespace {

void* nvinfer() {
    char const* const asked = std::getenv("LOADER_TENSORRT");
    char const* const name = asked ? asked : "libnvinfer.so.10";
    void* const library = dlopen(name, RTLD_NOLOAD | RTLD_NOW);
    if (!library) std::printf("{\"error\": \"%s is not loaded\"}\n", name);
    return library;
}

IPluginRegistry* registry() {
    void* const library = nvinfer();
    return library ? reinterpret_cast<IPluginRegistry* (*)()>(dlsym(library, "getPluginRegistry"))() : nullptr;
}

}  // namespace

int main() {
    std::setvbuf(stdout, nullptr, _IONBF, 0);
    void* handle = nullptr;
    for (std::string word, path; std::cin >> word;) {
        if (word == "unlibrary") {
            registry()->deregisterLibrary(handle);
        } else if (word == "creators") {
            int32_t count = 0;
            if (IPluginRegistry* const from = registry()) from->getAllCreators(&count);
            bool const found = count && registry()->getCreator("SparseConv2d", "1", "");
            std::printf("{\"creators\": %d, \"found\": %s}\n", count, found ? "true" : "false");
        } else {
            std::cin >> path;
            if (word == "library") {
                handle = registry()->loadLibrary(path.c_str());
                std::printf("{\"library\": %s}\n", handle ? "true" : "false");
            } else if (word == "register") {
                void* const library = dlopen(path.c_str(), RTLD_NOW);
                bool const done = reinterpret_cast<bool (*)()>(dlsym(library, "sparsedeployRegister"))();
                std::printf("{\"registered\": %s}\n", done ? "true" : "false");
            } else if (!dlopen(path.c_str(), RTLD_NOW | (word == "global" ? RTLD_GLOBAL : RTLD_LOCAL))) {
                std::printf("{\"error\": \"%s\"}\n", dlerror());
            }
        }
    }
}
