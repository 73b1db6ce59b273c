// libnvinfer.so.<n> with nothing but a plugin registry and a logger, which print one line of JSON per event.
// $FAKE_TENSORRT_VERSION is what getInferLibVersion says.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "NvInferRuntime.h"
#include "fields_file.h"

using namespace nvinfer1;

namespace {

struct Logger : ILogger {
    void log(Severity severity, char const* words) noexcept override {
        std::printf("{\"log\": %d, \"words\": %s}\n", static_cast<int>(severity), quoted(words).c_str());
    }
};
Logger theLogger;

struct Finder : ILoggerFinder {
    ILogger* findLogger() override { return &theLogger; }
};
Finder theFinder;

class Registry : public IPluginRegistry {
  public:
    bool registerCreator(IPluginCreator& creator, char const* name) noexcept override {
        return registerCreator(static_cast<IPluginCreatorInterface&>(creator), name);
    }
    IPluginCreator* const* getPluginCreatorList(int32_t* count) const noexcept override {
        *count = 0;
        return nullptr;
    }
    IPluginCreator* getPluginCreator(char const*, char const*, char const*) noexcept override { return nullptr; }
    void setErrorRecorder(IErrorRecorder*) noexcept override {}
    IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
    bool deregisterCreator(IPluginCreator const& creator) noexcept override {
        return deregisterCreator(static_cast<IPluginCreatorInterface const&>(creator));
    }
    bool isParentSearchEnabled() const override { return false; }
    void setParentSearchEnabled(bool) override {}
    PluginLibraryHandle loadLibrary(char const* path) noexcept override {
        void* const library = dlopen(path, RTLD_LAZY);
        if (!library) return nullptr;
        auto const setFinder = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"));
        auto const get = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(library, "getCreators"));
        if (!setFinder || !get) return nullptr;
        setFinder(&theFinder);
        int32_t count = 0;
        IPluginCreatorInterface* const* const all = get(count);
        for (int32_t i = 0; i < count; ++i) registerCreator(*all[i], "");
        return library;
    }
    void deregisterLibrary(PluginLibraryHandle handle) noexcept override {
        auto const get = reinterpret_cast<IPluginCreatorInterface* const* (*)(int32_t&)>(dlsym(handle, "getCreators"));
        int32_t count = 0;
        IPluginCreatorInterface* const* const all = get(count);
        for (int32_t i = 0; i < count; ++i) deregisterCreator(*all[i]);
        dlclose(handle);
    }
    bool registerCreator(IPluginCreatorInterface& creator, char const*) noexcept override {
        bool const isNew = !held(creator);
        if (isNew) creators_.push_back(&creator);
        say("register", isNew);
        return isNew;
    }
    IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept override {
        *count = static_cast<int32_t>(creators_.size());
        return creators_.data();
    }
    IPluginCreatorInterface* getCreator(char const* name, char const* version, char const*) noexcept override {
        for (IPluginCreatorInterface* creator : creators_) {
            if (std::string(creator->getInterfaceInfo().kind) != "PLUGIN CREATOR_V3ONE") continue;
            auto* const one = static_cast<IPluginCreatorV3One*>(creator);
            if (std::string(one->getPluginName()) == name && std::string(one->getPluginVersion()) == version) {
                return creator;
            }
        }
        return nullptr;
    }
    bool deregisterCreator(IPluginCreatorInterface const& creator) noexcept override {
        bool const known = held(creator);
        for (std::size_t i = creators_.size(); i-- > 0;) {
            if (creators_[i] == &creator) creators_.erase(creators_.begin() + static_cast<std::ptrdiff_t>(i));
        }
        say("deregister", known);
        return known;
    }
    IPluginResource* acquirePluginResource(char const*, IPluginResource*) noexcept override { return nullptr; }
    int32_t releasePluginResource(char const*) noexcept override { return 0; }
    IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t* count) noexcept override {
        return getAllCreators(count);
    }

  private:
    bool held(IPluginCreatorInterface const& creator) const {
        for (IPluginCreatorInterface const* known : creators_) {
            if (known == &creator) return true;
        }
        return false;
    }
    void say(char const* what, bool done) const {
        std::printf("{\"registry\": \"%s\", \"done\": %s, \"held\": %zu}\n", what, done ? "true" : "false",
                    creators_.size());
    }

    std::vector<IPluginCreatorInterface*> creators_;
};

Registry& registry() {
    static Registry* const one = new Registry();
    return *one;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))
API IPluginRegistry* getPluginRegistry() noexcept { return &registry(); }
API ILogger* getLogger() noexcept { return &theLogger; }
API int32_t getInferLibVersion() noexcept {
    char const* const text = std::getenv("FAKE_TENSORRT_VERSION");
    return text ? std::atoi(text) : 101401;
}
