// Drives a plugin through TensorRT's C++ interfaces in TensorRT's order. Reads one command per line, answers each with
// one line of JSON. Compiled with -DSPARSEDEPLOY_ADAPTER=2 or 3. Objects have numbers, from 0.
//   tensors N,3,6,5;N,4,6,5;7|N,4,6,5      shapes of inputs | outputs; N is the batch that a command names
//   create FILE | fields | restore FILE | clone I | destroy I | save I FILE | attach I | detach I
//   type TYPE | shape I N | formats I | types I TYPE | configure I TYPE MIN MAX | workspace I TYPE MAX | change I TYPE
//   N enqueue I TYPE N STREAM | time I TYPE N RUNS | threads I,I TYPE N RUNS | context C | loaded | leave
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "NvInferRuntime.h"
#include "fields_file.h"

using namespace nvinfer1;

// -- allocations of a thread, counted below every `new`: the plugin has its own, statically linked

extern "C" void* __libc_malloc(std::size_t);
extern "C" void* __libc_calloc(std::size_t, std::size_t);
extern "C" void* __libc_realloc(void*, std::size_t);
namespace {
thread_local long allocations = 0;
}
extern "C" void* malloc(std::size_t size) {
    ++allocations;
    return __libc_malloc(size);
}
extern "C" void* calloc(std::size_t count, std::size_t size) {
    ++allocations;
    return __libc_calloc(count, size);
}
extern "C" void* realloc(void* old, std::size_t size) {
    ++allocations;
    return __libc_realloc(old, size);
}

namespace {

// -- TensorRT's symbolic sizes

struct DimensionValue : apiv::VDimensionExpr {
    DimensionValue(bool isKnown, int64_t number) : known(isKnown), value(number) {}
    bool isConstant() const noexcept override { return known; }
#if NV_TENSORRT_MAJOR >= 10
    int64_t getConstantValue() const noexcept override { return value; }
    bool isSizeTensor() const noexcept override { return false; }
#else
    int32_t getConstantValue() const noexcept override { return static_cast<int32_t>(value); }
#endif
    bool known;
    int64_t value;
};

class Dimension : public IDimensionExpr {
  public:
    Dimension(bool known, int64_t value) : held_(known, value) { mImpl = &held_; }
    ~Dimension() noexcept override = default;

  private:
    DimensionValue held_;
};

IDimensionExpr const* dimension(bool known, int64_t value) { return new Dimension(known, value); }

struct Builder : apiv::VExprBuilder {
#if NV_TENSORRT_MAJOR >= 10
    using Number = int64_t;
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) noexcept override {
        return nullptr;
    }
#else
    using Number = int32_t;
#endif
    IDimensionExpr const* constant(Number value) noexcept override { return dimension(true, value); }
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& a,
                                    IDimensionExpr const& b) noexcept override {
        if (!a.isConstant() || !b.isConstant()) return dimension(false, 0);
        int64_t const x = a.getConstantValue(), y = b.getConstantValue();
        switch (op) {
            case DimensionOperation::kSUM:
                return dimension(true, x + y);
            case DimensionOperation::kSUB:
                return dimension(true, x - y);
            case DimensionOperation::kFLOOR_DIV:
                return dimension(true, x / y);
            default:
                std::abort();
        }
    }
};

class ExprBuilder : public IExprBuilder {
  public:
    ExprBuilder() { mImpl = &held_; }
    ~ExprBuilder() noexcept override = default;

  private:
    Builder held_;
};

// -- what the commands are about

struct Tensors {
    std::vector<Dims> inputs, outputs;  // -2 stands for N
};

Dims dimsOf(std::string const& text) {
    Dims dims{};
    std::istringstream sizes(text);
    for (std::string size; std::getline(sizes, size, ',');) {
        dims.d[dims.nbDims++] = size == "N" ? -2 : std::stoi(size);
    }
    return dims;
}

std::vector<Dims> listOf(std::string const& text) {
    std::vector<Dims> all;
    std::istringstream items(text);
    for (std::string item; std::getline(items, item, ';');) all.push_back(dimsOf(item));
    return all;
}

Dims withBatch(Dims dims, int64_t n) {
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        if (dims.d[i] == -2) dims.d[i] = static_cast<decltype(dims.d[0] + 0)>(n);
    }
    return dims;
}

DataType typeOf(std::string const& name) {
    return name == "fp16" ? DataType::kHALF : name == "fp32" ? DataType::kFLOAT : DataType::kINT32;
}

Tensors tensors;
DataType floatType = DataType::kFLOAT;

/// Constants are the tensors of rank 1.
PluginTensorDesc desc(Dims const& dims, int64_t n) {
    PluginTensorDesc made{};
    made.dims = withBatch(dims, n);
    made.type = dims.nbDims == 1 ? DataType::kINT32 : floatType;
    made.format = TensorFormat::kLINEAR;
    return made;
}

std::vector<PluginTensorDesc> descs(int64_t n, bool withOutputs = false) {
    std::vector<PluginTensorDesc> all;
    for (Dims const& dims : tensors.inputs) all.push_back(desc(dims, n));
    for (Dims const& dims : tensors.outputs) {
        if (withOutputs) all.push_back(desc(dims, n));
    }
    return all;
}

DynamicPluginTensorDesc dynamic(Dims const& dims, int64_t least, int64_t most) {
    DynamicPluginTensorDesc made{};
    made.desc = desc(dims, least == most ? most : -1);
    made.min = withBatch(dims, least);
    made.max = withBatch(dims, most);
#if NV_TENSORRT_MAJOR >= 10
    made.opt = made.max;
#endif
    return made;
}

std::vector<DynamicPluginTensorDesc> dynamics(std::vector<Dims> const& all, int64_t least, int64_t most) {
    std::vector<DynamicPluginTensorDesc> made;
    for (Dims const& dims : all) made.push_back(dynamic(dims, least, most));
    return made;
}

std::vector<FileField> fileFields;
std::vector<PluginField> pluginFields;
PluginFieldCollection collectionFrom(std::string const& path) {
    fileFields = readFieldsFile(path);
    pluginFields.clear();
    for (FileField const& field : fileFields) {
        PluginField made;
        made.name = field.name.c_str();
        // No terminator after the data, as TensorRT promises none.
        char* const data = static_cast<char*>(std::malloc(field.bytes.size() + 1));
        std::memcpy(data, field.bytes.data(), field.bytes.size());
        data[field.bytes.size()] = '?';
        made.data = data;
        std::size_t width = field.type == 'i' ? 4 : field.type == 'l' ? 8 : 1;
        made.length = static_cast<int32_t>(field.bytes.size() / width);
        made.type = field.type == 'i'   ? PluginFieldType::kINT32
                    : field.type == 'c' ? PluginFieldType::kCHAR
                                        : PluginFieldType::kINT8;
#if NV_TENSORRT_MAJOR >= 10
        if (field.type == 'l') made.type = PluginFieldType::kINT64;
#endif
        pluginFields.push_back(made);
    }
    PluginFieldCollection collection{};
    collection.nbFields = static_cast<int32_t>(pluginFields.size());
    collection.fields = pluginFields.data();
    return collection;
}

void* pluginLibrary = nullptr;
template <typename Function>
Function find(void* library, char const* name) {
    void* const symbol = dlsym(library, name);
    if (!symbol) std::fprintf(stderr, "%s\n", dlerror());
    return reinterpret_cast<Function>(symbol);
}

// -- the two generations under one set of names

#if SPARSEDEPLOY_ADAPTER == 3

using Plugin = IPluginV3;
IPluginCreatorV3One* creator() {
    int32_t count = 0;
    auto* const all = find<IPluginCreatorInterface* const* (*)(int32_t&)>(pluginLibrary, "getCreators")(count);
    return count == 1 ? static_cast<IPluginCreatorV3One*>(all[0]) : nullptr;
}
IPluginV3OneBuild* build(Plugin* plugin) {
    return static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
}
IPluginV3OneRuntime* runtime(Plugin* plugin) {
    return static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}
Plugin* create(std::string const& path, TensorRTPhase phase) {
    PluginFieldCollection const fields = collectionFrom(path);
    return creator()->createPlugin("node", &fields, phase);
}
Plugin* restore(std::string const& path) { return create(path, TensorRTPhase::kRUNTIME); }
void destroy(Plugin* plugin) { delete plugin; }
void save(Plugin* plugin, std::string const& path) {
    std::ofstream file(path);
    PluginFieldCollection const* const fields = runtime(plugin)->getFieldsToSerialize();
    for (int32_t i = 0; i < fields->nbFields; ++i) {
        PluginField const& field = fields->fields[i];
        bool const isInt = field.type == PluginFieldType::kINT32;
        std::string const bytes(static_cast<char const*>(field.data),
                                static_cast<std::size_t>(field.length) * (isInt ? 4 : 1));
        char const type = isInt ? 'i' : field.type == PluginFieldType::kCHAR ? 'c' : 'b';
        file << field.name << ' ' << type << ' ' << toHex(bytes) << '\n';
    }
}
Plugin* attach(Plugin* plugin) { return runtime(plugin)->attachToContext(nullptr); }
DimsExprs shape(Plugin* plugin, DimsExprs const* inputs, int32_t count, ExprBuilder& builder, int32_t& status) {
    DimsExprs output{};
    status = build(plugin)->getOutputShapes(inputs, count, nullptr, 0, &output, 1, builder);
    return output;
}
bool supports(Plugin* plugin, int32_t pos, std::vector<PluginTensorDesc> const& all, int32_t inputs) {
    std::vector<DynamicPluginTensorDesc> wrapped(all.size());
    for (std::size_t i = 0; i < all.size(); ++i) wrapped[i].desc = all[i];
    return build(plugin)->supportsFormatCombination(pos, wrapped.data(), inputs,
                                                    static_cast<int32_t>(all.size()) - inputs);
}
int32_t configure(Plugin* plugin, std::vector<DynamicPluginTensorDesc> const& in,
                  std::vector<DynamicPluginTensorDesc> const& out) {
    return build(plugin)->configurePlugin(in.data(), static_cast<int32_t>(in.size()), out.data(),
                                          static_cast<int32_t>(out.size()));
}
std::size_t workspace(Plugin* plugin, int64_t most) {
    auto const in = dynamics(tensors.inputs, 1, most), out = dynamics(tensors.outputs, 1, most);
    return build(plugin)->getWorkspaceSize(in.data(), static_cast<int32_t>(in.size()), out.data(),
                                           static_cast<int32_t>(out.size()));
}
int32_t change(Plugin* plugin, int64_t n) {
    auto const all = descs(n, true);
    auto const count = static_cast<int32_t>(tensors.inputs.size());
    return runtime(plugin)->onShapeChange(all.data(), count, all.data() + count, 1);
}
int32_t enqueue(Plugin* plugin, PluginTensorDesc const* in, PluginTensorDesc const* out, void const* const* inputs,
                void* const* outputs, void* room, cudaStream_t stream) {
    return runtime(plugin)->enqueue(in, out, inputs, outputs, room, stream);
}
DataType outputType(Plugin* plugin, std::vector<DataType> const& inputs) {
    DataType type = DataType::kBOOL;
    build(plugin)->getOutputDataTypes(&type, 1, inputs.data(), static_cast<int32_t>(inputs.size()));
    return type;
}

#else

using Plugin = IPluginV2DynamicExt;
IPluginCreator* creator() {
    int32_t count = 0;
    auto* const all = find<IPluginCreator* const* (*)(int32_t&)>(pluginLibrary, "getPluginCreators")(count);
    return count == 1 ? all[0] : nullptr;
}
Plugin* create(std::string const& path, int) {
    PluginFieldCollection const fields = collectionFrom(path);
    return static_cast<Plugin*>(creator()->createPlugin("node", &fields));
}
Plugin* restore(std::string const& path) {
    std::ifstream file(path, std::ios::binary);
    std::string const blob((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    return static_cast<Plugin*>(creator()->deserializePlugin("node", blob.data(), blob.size()));
}
void destroy(Plugin* plugin) { plugin->destroy(); }
void save(Plugin* plugin, std::string const& path) {
    std::string blob(plugin->getSerializationSize(), '?');
    plugin->serialize(&blob[0]);
    std::ofstream(path, std::ios::binary) << blob;
}
/// V2 initialises in place, after TensorRT cloned it for the context.
Plugin* attach(Plugin* plugin) {
    auto* const own = plugin->clone();
    if (own->initialize() == 0) return own;
    own->destroy();
    return nullptr;
}
DimsExprs shape(Plugin* plugin, DimsExprs const* inputs, int32_t count, ExprBuilder& builder, int32_t& status) {
    status = 0;
    return plugin->getOutputDimensions(0, inputs, count, builder);
}
bool supports(Plugin* plugin, int32_t pos, std::vector<PluginTensorDesc> const& all, int32_t inputs) {
    return plugin->supportsFormatCombination(pos, all.data(), inputs, static_cast<int32_t>(all.size()) - inputs);
}
int32_t configure(Plugin* plugin, std::vector<DynamicPluginTensorDesc> const& in,
                  std::vector<DynamicPluginTensorDesc> const& out) {
    plugin->configurePlugin(in.data(), static_cast<int32_t>(in.size()), out.data(), static_cast<int32_t>(out.size()));
    return 0;
}
std::size_t workspace(Plugin* plugin, int64_t most) {
    auto const all = descs(most, true);
    auto const count = static_cast<int32_t>(tensors.inputs.size());
    return plugin->getWorkspaceSize(all.data(), count, all.data() + count, 1);
}
int32_t change(Plugin* plugin, int64_t n) {
    return configure(plugin, dynamics(tensors.inputs, n, n), dynamics(tensors.outputs, n, n));
}
int32_t enqueue(Plugin* plugin, PluginTensorDesc const* in, PluginTensorDesc const* out, void const* const* inputs,
                void* const* outputs, void* room, cudaStream_t stream) {
    return plugin->enqueue(in, out, inputs, outputs, room, stream);
}
DataType outputType(Plugin* plugin, std::vector<DataType> const& inputs) {
    return plugin->getOutputDataType(0, inputs.data(), static_cast<int32_t>(inputs.size()));
}

#endif

std::vector<Plugin*> plugins;

std::string kept(Plugin* plugin) {
    if (!plugin) return "{\"object\": null}";
    plugins.push_back(plugin);
    return "{\"object\": " + std::to_string(plugins.size() - 1) + "}";
}

/// Addresses that the tests can recognise: input k at 0x100000 * (k + 1), then output and workspace.
struct Call {
    std::vector<PluginTensorDesc> all;
    std::vector<void const*> inputs;
    void* output = reinterpret_cast<void*>(0x90000000);
    void* room = reinterpret_cast<void*>(0xA0000000);

    explicit Call(int64_t n) : all(descs(n, true)) {
        for (std::size_t i = 0; i < tensors.inputs.size(); ++i) {
            inputs.push_back(reinterpret_cast<void const*>(0x100000 * (i + 1)));
        }
    }
    int32_t run(Plugin* plugin, std::size_t stream) const {
        return enqueue(plugin, all.data(), all.data() + inputs.size(), inputs.data(), &output, room,
                       reinterpret_cast<cudaStream_t>(stream));
    }
};

std::string numbers(DimsExprs const& dims) {
    std::string out = "[";
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        bool const known = dims.d[i]->isConstant();
        out += (i ? ", " : "") + std::to_string(known ? dims.d[i]->getConstantValue() : -1);
    }
    return out + "]";
}

std::string shapeCommand(Plugin* plugin, int64_t n) {
    std::vector<DimsExprs> inputs;
    for (Dims const& dims : tensors.inputs) {
        DimsExprs made{};
        made.nbDims = dims.nbDims;
        for (int32_t i = 0; i < dims.nbDims; ++i) {
            bool const isBatch = dims.d[i] == -2;
            made.d[i] = dimension(!isBatch || n >= 0, isBatch ? n : dims.d[i]);
        }
        inputs.push_back(made);
    }
    ExprBuilder builder;
    int32_t status = 0;
    DimsExprs const output = shape(plugin, inputs.data(), static_cast<int32_t>(inputs.size()), builder, status);
    return "{\"status\": " + std::to_string(status) + ", \"shape\": " + numbers(output) + "}";
}

/// Every float type, and the formats that TensorRT tries, in the positions of activations; constants as they are.
std::string formatsCommand(Plugin* plugin) {
    std::string out = "{\"formats\": [";
    for (DataType type : {DataType::kFLOAT, DataType::kHALF, DataType::kINT8}) {
        for (TensorFormat format : {TensorFormat::kLINEAR, TensorFormat::kCHW2, TensorFormat::kHWC8}) {
            std::vector<PluginTensorDesc> all = descs(-1, true);
            bool fits = true;
            for (std::size_t i = 0; i < all.size(); ++i) {
                if (all[i].type != DataType::kINT32) {
                    all[i].type = type;
                    all[i].format = format;
                }
                fits =
                    fits && supports(plugin, static_cast<int32_t>(i), all, static_cast<int32_t>(tensors.inputs.size()));
            }
            if (fits) {
                out += (out.back() == '[' ? "[" : ", [") + std::to_string(static_cast<int>(type)) + ", " +
                       std::to_string(static_cast<int>(format)) + "]";
            }
        }
    }
    return out + "]}";
}

void setContext(void* context) {
    static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver) find<void (*)(void*)>(driver, "fakeSetCurrent")(context);
}

int ask(char const* name) {
    static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    return driver ? find<int (*)()>(driver, name)() : -1;
}

std::string threadsCommand(std::string const& which, int64_t n, int runs) {
    std::vector<std::thread> threads;
    std::atomic<int> failures{0};
    std::istringstream list(which);
    std::size_t number = 0;
    for (std::string id; std::getline(list, id, ','); ++number) {
        Plugin* const plugin = plugins.at(std::stoul(id));
        threads.emplace_back([plugin, n, runs, number, &failures] {
            Call const call(n);
            for (int i = 0; i < runs; ++i) failures += call.run(plugin, number + 1) != 0;
        });
    }
    for (std::thread& thread : threads) thread.join();
    return "{\"failures\": " + std::to_string(failures.load()) + "}";
}

std::string answer(std::istringstream& words) {
    std::string command, text, type;
    std::size_t id = 0, stream = 0;
    int64_t n = 0, most = 0;
    words >> command;
    if (command == "tensors") {
        words >> text;
        std::size_t const bar = text.find('|');
        tensors = Tensors{listOf(text.substr(0, bar)), listOf(text.substr(bar + 1))};
        return "{}";
    }
    if (command == "create" || command == "restore") {
        words >> text;
#if SPARSEDEPLOY_ADAPTER == 3
        return kept(command == "create" ? create(text, TensorRTPhase::kBUILD) : restore(text));
#else
        return kept(command == "create" ? create(text, 0) : restore(text));
#endif
    }
    if (command == "type") {
        words >> type;
        floatType = typeOf(type);
        return "{}";
    }
    if (command == "fields") {
        PluginFieldCollection const* const names = creator()->getFieldNames();
        std::string out = "{\"name\": " + quoted(creator()->getPluginName()) +
                          ", \"version\": " + quoted(creator()->getPluginVersion()) +
                          ", \"namespace\": " + quoted(creator()->getPluginNamespace()) + ", \"fields\": [";
        for (int32_t i = 0; i < names->nbFields; ++i) out += (i ? ", " : "") + quoted(names->fields[i].name);
        return out + "]}";
    }
    if (command == "context") {
        words >> id;
        setContext(reinterpret_cast<void*>(id));
        return "{}";
    }
    if (command == "loaded") return "{\"loaded\": " + std::to_string(ask("fakeLoaded")) + "}";
    if (command == "leave") std::exit(0);  // with every object alive
    if (command == "threads") {
        int runs = 0;
        words >> text >> type >> n >> runs;
        floatType = typeOf(type);
        return threadsCommand(text, n, runs);
    }
    words >> id;
    Plugin* const plugin = plugins.at(id);
    if (command == "clone") return kept(static_cast<Plugin*>(plugin->clone()));
    if (command == "destroy") {
        destroy(plugin);
        plugins[id] = nullptr;
        return "{}";
    }
#if SPARSEDEPLOY_ADAPTER == 2
    if (command == "detach") {
        plugin->terminate();
        return "{}";
    }
#endif
    if (command == "save") {
        words >> text;
        save(plugin, text);
        return "{}";
    }
    if (command == "attach") return kept(attach(plugin));
    if (command == "shape") {
        words >> n;
        return shapeCommand(plugin, n);
    }
    if (command == "formats") return formatsCommand(plugin);
    words >> type >> n;
    floatType = typeOf(type);
    if (command == "types") {
        std::vector<DataType> inputs;
        for (PluginTensorDesc const& tensor : descs(1)) inputs.push_back(tensor.type);
        return "{\"type\": " + std::to_string(static_cast<int>(outputType(plugin, inputs))) + "}";
    }
    if (command == "configure") {
        words >> most;
        int32_t const status = configure(plugin, dynamics(tensors.inputs, n, most), dynamics(tensors.outputs, n, most));
        return "{\"status\": " + std::to_string(status) + "}";
    }
    if (command == "workspace") return "{\"bytes\": " + std::to_string(workspace(plugin, n)) + "}";
    if (command == "time") {
        int64_t runs = 0;
        words >> runs;
        Call const call(n);
        auto const cpuTime = [] {  // of this thread: other work on the machine does not count
            timespec now{};
            clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
            return 1e9 * static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec);
        };
        double const start = cpuTime();
        for (int64_t i = 0; i < runs; ++i) call.run(plugin, 1);
        double const spent = cpuTime() - start;
        return "{\"ns\": " + std::to_string(spent / static_cast<double>(runs)) + "}";
    }
    if (command == "change") return "{\"status\": " + std::to_string(change(plugin, n)) + "}";
    if (command == "enqueue") {
        words >> stream;
        Call const call(n);
        long const before = allocations;
        int32_t const status = call.run(plugin, stream);
        long const made = allocations - before;
        return "{\"status\": " + std::to_string(status) + ", \"allocations\": " + std::to_string(made) + "}";
    }
    throw std::runtime_error("unknown command " + command);
}

}  // namespace

// -- as a shared library, for tests on a GPU: there addresses, context and streams are the caller's

#define API extern "C" __attribute__((visibility("default")))

API int hostOpen(char const* path) {
    pluginLibrary = dlopen(path, RTLD_NOW);
    if (!pluginLibrary) std::fprintf(stderr, "%s\n", dlerror());
    return pluginLibrary ? 0 : 1;
}
API char const* hostAnswer(char const* line) {
    static std::string said;
    std::istringstream words(line);
    said = answer(words);
    return said.c_str();
}

struct Place {
    void const* const* inputs;
    void* output;
    void* workspace;
    void* stream;
    int64_t step;  // bytes from one run's output to the next one's
};
/// `runs` times; the number of refusals.
API int hostEnqueue(int id, int64_t n, Place const* place, int runs) {
    std::vector<PluginTensorDesc> const all = descs(n, true);
    Plugin* const plugin = plugins.at(static_cast<std::size_t>(id));
    auto const stream = static_cast<cudaStream_t>(place->stream);
    int failures = 0;
    for (int i = 0; i < runs; ++i) {
        void* output = static_cast<char*>(place->output) + i * place->step;
        failures += enqueue(plugin, all.data(), all.data() + tensors.inputs.size(), place->inputs, &output,
                            place->workspace, stream) != 0;
    }
    return failures;
}
/// `threads` at once, each running its share of the objects in turn; every object has its place, all the caller's context.
API int hostThreads(int const* ids, int64_t n, Place const* places, int count, int threads, int runs,
                    int (*setContext)(void*), void* context) {
    std::vector<std::thread> started;
    std::atomic<int> failures{0};
    for (int first = 0; first < threads; ++first) {
        started.emplace_back([=, &failures] {
            failures += setContext(context) != 0;
            for (int run = 0; run < runs; ++run) {
                for (int i = first; i < count; i += threads) {
                    Place place = places[i];
                    place.output = static_cast<char*>(place.output) + run * place.step;
                    failures += hostEnqueue(ids[i], n, &place, 1);
                }
            }
        });
    }
    for (std::thread& thread : started) thread.join();
    return failures.load();
}
/// Nanoseconds of host time per launch of the driver alone (cuLaunchKernelEx), to compare hostNanoseconds with.
API double driverNanoseconds(int (*launch)(void const*, void*, void**, void**), void const* config, void* function,
                             void** parameters, int runs) {
    auto const start = std::chrono::steady_clock::now();
    int failures = 0;
    for (int i = 0; i < runs; ++i) failures += launch(config, function, parameters, nullptr) != 0;
    std::chrono::duration<double, std::nano> const spent = std::chrono::steady_clock::now() - start;
    return failures ? -1 : spent.count() / runs;
}
/// Nanoseconds of host time per enqueue; nothing waits as long as the queue has room.
API double hostNanoseconds(int id, int64_t n, Place const* place, int runs) {
    auto const start = std::chrono::steady_clock::now();
    int const failures = hostEnqueue(id, n, place, runs);
    std::chrono::duration<double, std::nano> const spent = std::chrono::steady_clock::now() - start;
    return failures ? -1 : spent.count() / runs;
}

int main(int, char** arguments) {
    if (hostOpen(arguments[1]) != 0) return 1;
    setContext(reinterpret_cast<void*>(0x77));
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::cout << answer(words) << std::endl;
    }
}
