#include "core.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "inflate.h"

namespace sparsedeploy {

namespace {

constexpr int32_t kHopper = 90;
constexpr int32_t kSharedWithoutAsking = 48 * 1024, kPortableCluster = 8;
constexpr int64_t kMaxGrid[3] = {0x7FFFFFFF, 65535, 65535};

std::string capabilityName(int32_t capability) {
    return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

int32_t currentCapability(cuda::Driver const& driver) {
    cuda::Device device = 0;
    int major = 0, minor = 0;
    cuda::check(driver, driver.currentDevice(&device), "cuCtxGetDevice");
    cuda::check(driver, driver.deviceAttribute(&major, cuda::kDeviceMajor, device), "cuDeviceGetAttribute");
    cuda::check(driver, driver.deviceAttribute(&minor, cuda::kDeviceMinor, device), "cuDeviceGetAttribute");
    return 10 * major + minor;
}

}  // namespace

bool operator==(Shape const& a, Shape const& b) { return a.rank == b.rank && std::equal(a.d, a.d + a.rank, b.d); }

std::string shown(Shape const& shape) {
    std::string text = "[";
    for (int32_t i = 0; i < shape.rank; ++i) text += (i ? ", " : "") + std::to_string(shape.d[i]);
    return text + "]";
}

Image const& pickImage(Node const& node, Precision precision, int32_t capability) {
    Image const* best = nullptr;
    std::string inside;
    for (Image const& image : node.images()) {
        if (image.precision != precision) continue;
        bool const isPtx = image.kind == ImageKind::kPtx;
        inside += (inside.empty() ? "sm_" : ", sm_") + std::to_string(image.arch) + (isPtx ? " ptx" : " cubin");
        if (!isPtx && image.arch == capability) return image;
        if (isPtx && image.arch <= capability && (!best || image.arch > best->arch)) best = &image;
    }
    if (best) return *best;
    throw Error("no image for this device: it has compute capability " + capabilityName(capability) + ", the node's " +
                nameOf(precision) + " images are " + (inside.empty() ? "none" : inside) +
                ". Convert again for a target with this architecture.");
}

class LoadedImage {
  public:
    LoadedImage(std::shared_ptr<Node const> node, Image const& image, cuda::Driver const& driver, cuda::Context context)
        : node_(std::move(node)), image_(image), driver_(driver), context_(context) {
        std::string const code = inflate(node_->packed(image_), image_.packedSize, image_.size);
        // The driver's log says why it refuses PTX; PTX must end in NUL, which std::string does.
        char log[2048] = "";
        int options[] = {cuda::kJitErrorLog, cuda::kJitErrorLogSize};
        void* values[] = {log, reinterpret_cast<void*>(sizeof(log) - 1)};
        cuda::Result const result = driver_.loadModule(&module_, code.c_str(), 2, options, values);
        std::string const kind = image_.kind == ImageKind::kPtx ? " ptx" : " cubin";
        cuda::check(driver_, result,
                    "loading the sm_" + std::to_string(image_.arch) + kind + (log[0] ? " (" + trimmed(log) + ")" : ""));
    }
    LoadedImage(LoadedImage const&) = delete;
    LoadedImage& operator=(LoadedImage const&) = delete;

    ~LoadedImage() {
        // Quiet: at the end of a process the context, or the driver, may be gone before the plugin.
        if (driver_.pushContext(context_) != cuda::kSuccess) return;
        driver_.unloadModule(module_);
        cuda::Context popped = nullptr;
        driver_.popContext(&popped);
    }

    bool holds(Node const& node, Image const& image) const {
        return image.packedSize == image_.packedSize && image.size == image_.size &&
               std::memcmp(node.packed(image), node_->packed(image_), image.packedSize) == 0;
    }
    cuda::Module module() const { return module_; }

  private:
    static std::string trimmed(std::string text) {
        while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
        std::replace(text.begin(), text.end(), '\n', ' ');
        return text;
    }

    std::shared_ptr<Node const> node_;
    Image image_;
    cuda::Driver const& driver_;
    cuda::Context context_;
    cuda::Module module_ = nullptr;
};

namespace {

/// A context's address may be used again after its end; its number, where the driver has one, is not.
struct CacheKey {
    cuda::Context context;
    unsigned long long contextId;
    uint64_t hash;
    bool operator<(CacheKey const& other) const {
        return std::tie(context, contextId, hash) < std::tie(other.context, other.contextId, other.hash);
    }
};

struct Cache {
    std::mutex mutex;
    std::map<CacheKey, std::weak_ptr<LoadedImage const>> images;
};

Cache& cache() {
    static Cache* const cache = new Cache();  // outlives every static destructor
    return *cache;
}

std::shared_ptr<LoadedImage const> loadImage(cuda::Driver const& driver, cuda::Context context,
                                             std::shared_ptr<Node const> const& node, Image const& image) {
    CacheKey key{context, 0, image.hash};
    if (driver.contextId) driver.contextId(context, &key.contextId);
    Cache& images = cache();
    std::lock_guard<std::mutex> const lock(images.mutex);
    for (auto at = images.images.begin(); at != images.images.end();) {
        at = at->second.expired() ? images.images.erase(at) : std::next(at);
    }
    auto const found = images.images.find(key);
    if (found != images.images.end()) {
        auto const held = found->second.lock();
        if (held && held->holds(*node, image)) return held;
    }
    auto const loaded = std::make_shared<LoadedImage const>(node, image, driver, context);
    images.images[key] = loaded;
    return loaded;
}

/// Most dynamic shared memory that any launch of this entry asks for: the setting belongs to the entry, not the launch.
int32_t largestShared(Plan const& plan, Precision precision, std::string const& entry) {
    int32_t most = 0;
    for (Variant const& variant : plan) {
        if (variant.precision != precision) continue;
        for (Op const& op : variant.ops) {
            if (!op.isMemset && op.entry == entry) most = std::max(most, op.sharedBytes);
        }
    }
    return most;
}

cuda::Function configured(Program const& program, Plan const& plan, Precision precision, Op const& op,
                          int32_t capability) {
    cuda::Driver const& driver = *program.driver;
    if (op.cluster > 1 && (!program.isHopper || !driver.launchEx)) {
        throw Error("its plan launches clusters of " + std::to_string(op.cluster) +
                    " blocks, which need compute capability 9.0 and a driver of CUDA 11.8; this device has " +
                    capabilityName(capability) + ". Convert again for this device.");
    }
    cuda::Function function = nullptr;
    cuda::Result const found = driver.function(&function, program.image->module(), op.entry.c_str());
    cuda::check(driver, found, "looking up kernel " + op.entry);
    int32_t const shared = largestShared(plan, precision, op.entry);
    if (shared > kSharedWithoutAsking) {
        cuda::Result const allowed = driver.setAttribute(function, cuda::kFunctionDynamicShared, shared);
        cuda::check(driver, allowed,
                    "allowing kernel " + op.entry + " " + std::to_string(shared) + " bytes of shared memory");
    }
    if (op.cluster > kPortableCluster) {
        cuda::Result const allowed = driver.setAttribute(function, cuda::kFunctionWideCluster, 1);
        cuda::check(driver, allowed, "allowing kernel " + op.entry + " clusters of " + std::to_string(op.cluster));
    }
    // Lazy loading would put this off to the first launch, which may be under graph capture.
    if (driver.loadFunction) cuda::check(driver, driver.loadFunction(function), "loading kernel " + op.entry);
    return function;
}

unsigned gridSize(Op const& op, std::size_t axis, Sizes const& sizes) {
    int64_t const size = op.grid[axis].value(sizes);
    if (size >= 1 && size <= kMaxGrid[axis]) return static_cast<unsigned>(size);
    throw Error("its plan launches " + op.entry + " with a grid of " + std::to_string(size) + " along axis " +
                std::to_string(axis) + ", a device runs 1 to " + std::to_string(kMaxGrid[axis]) +
                ". Convert for a smaller batch.");
}

/// Fills in what the launch needs; how many there are.
unsigned attributesOf(Op const& op, Program const& program, cuda::LaunchAttribute* attributes) {
    unsigned count = 0;
    if (op.cluster > 1) {
        attributes[count].id = cuda::kLaunchCluster;
        unsigned const cluster[3] = {static_cast<unsigned>(op.cluster), 1, 1};
        std::memcpy(attributes[count++].value.cluster, cluster, sizeof(cluster));
    }
    // Where a device has no dependent launches the kernel waits for the one ahead of it anyway.
    if (op.dependent && program.isHopper && program.driver->launchEx) {
        attributes[count].id = cuda::kLaunchDependent;
        attributes[count++].value.flag = 1;
    }
    return count;
}

}  // namespace

std::shared_ptr<Program const> prepare(std::shared_ptr<Node const> const& node, Precision precision) {
    cuda::Driver const& driver = cuda::driver();
    cuda::Context context = nullptr;
    cuda::check(driver, driver.currentContext(&context), "cuCtxGetCurrent");
    if (!context) {
        throw Error(
            "no CUDA context is current in the thread that prepares it. TensorRT makes one current; a program that "
            "calls the plugin itself has to, before it attaches it.");
    }
    if (!node->offers(precision)) {
        throw Error("it carries no " + std::string(nameOf(precision)) +
                    " code. Convert the model for this precision, or build the engine for the other.");
    }
    int32_t const capability = currentCapability(driver);
    auto program = std::make_shared<Program>();
    program->driver = &driver;
    program->isHopper = capability >= kHopper;
    program->image = loadImage(driver, context, node, pickImage(*node, precision, capability));
    for (Variant const& variant : node->plan()) {
        std::vector<cuda::Function> functions(variant.ops.size(), nullptr);
        for (std::size_t i = 0; variant.precision == precision && i < variant.ops.size(); ++i) {
            if (variant.ops[i].isMemset) continue;
            functions[i] = configured(*program, node->plan(), precision, variant.ops[i], capability);
        }
        program->functions.push_back(std::move(functions));
    }
    return program;
}

void Instance::checkInput(Shape const& input) const {
    Geometry const& g = node_->geometry();
    auto const is = [](int64_t size, int64_t needed) { return size == needed || size == -1; };
    bool const fits =
        input.rank == 4 && is(input.d[1], g.ic) && (!node_->fixedHw() || (is(input.d[2], g.h) && is(input.d[3], g.w)));
    if (fits) return;
    std::string const size = node_->fixedHw() ? std::to_string(g.h) + ", " + std::to_string(g.w) : std::string("H, W");
    throw Error("its input is " + shown(input) + ", needed [N, " + std::to_string(g.ic) + ", " + size +
                "]: the kernel was made for that height and width. Convert the model again for this input size.");
}

int64_t Instance::outputHeight(int64_t height) const {
    Geometry const& g = node_->geometry();
    return (height + g.top + g.bottom - static_cast<int64_t>(g.dilationH) * (g.kh - 1) - 1) / g.strideH + 1;
}

int64_t Instance::outputWidth(int64_t width) const {
    Geometry const& g = node_->geometry();
    return (width + g.left + g.right - static_cast<int64_t>(g.dilationW) * (g.kw - 1) - 1) / g.strideW + 1;
}

void Instance::checkShapes(Shape const& input, Shape const* residual, Shape const& output) const {
    checkInput(input);
    Shape needed{4, {input.d[0], node_->geometry().oc, -1, -1}};
    if (input.d[2] >= 0) needed.d[2] = outputHeight(input.d[2]);
    if (input.d[3] >= 0) needed.d[3] = outputWidth(input.d[3]);
    auto const fits = [&needed](Shape const& shape) {
        if (shape.rank != 4) return false;
        for (int32_t i = 0; i < 4; ++i) {
            if (shape.d[i] != needed.d[i] && shape.d[i] != -1 && needed.d[i] != -1) return false;
        }
        return true;
    };
    if (!fits(output)) throw Error("its output is " + shown(output) + ", needed " + shown(needed) + ".");
    if (residual && !fits(*residual)) {
        throw Error("the residual that it adds is " + shown(*residual) + ", its output " + shown(needed) +
                    ": they must have one shape, nothing is broadcast. Convert the model again, with this addition "
                    "left outside the plugin.");
    }
}

void Instance::checkBatches(Precision precision, int64_t minN, int64_t maxN) const {
    for (int64_t n = std::max<int64_t>(minN, 1); n <= maxN; ++n) {
        if (chooseVariant(node_->plan(), precision, n) >= 0) continue;
        std::string held;
        for (Variant const& variant : node_->plan()) {
            held += (held.empty() ? "" : ", ") + std::string(nameOf(variant.precision)) +
                    " N=" + std::to_string(variant.minN) + ".." +
                    (variant.maxN ? std::to_string(variant.maxN) : std::string("any"));
        }
        throw Error("nothing in its plan runs " + std::string(nameOf(precision)) + " with N=" + std::to_string(n) +
                    "; it has " + (held.empty() ? "nothing" : held) + ". Convert for this batch.");
    }
}

Sizes Instance::sizes(int64_t n, int64_t height, int64_t width) const {
    return Sizes{{n, height, width, outputHeight(height), outputWidth(width)}};
}

std::size_t Instance::workspace(Precision precision, int64_t maxN, int64_t height, int64_t width) const {
    int64_t most = 0;
    for (int64_t n = 1; n <= maxN; ++n) {
        int32_t const variant = chooseVariant(node_->plan(), precision, n);
        if (variant < 0) continue;
        Expr const& bytes = node_->plan()[static_cast<std::size_t>(variant)].workspace;
        most = std::max(most, bytes.value(sizes(n, height, width)));
    }
    return static_cast<std::size_t>(most);
}

void Instance::load(Precision precision) {
    if (!isLoaded(precision)) programs_[static_cast<std::size_t>(precision)] = prepare(node_, precision);
}

void Instance::load() {
    if (chosen_ >= 0) return load(static_cast<Precision>(chosen_));
    std::string refusal = "it carries no code. Convert it for a target and kernel that ship code.";
    bool any = false;
    for (int32_t i = 0; i < kPrecisions; ++i) {
        auto const precision = static_cast<Precision>(i);
        if (!node_->offers(precision)) continue;
        try {
            load(precision);
            any = true;
        } catch (Error const& error) {
            refusal = error.what();
        }
    }
    if (!any) throw Error(refusal);
}

void Instance::gather(Op const& op, Sizes const& sizes, Buffers const& buffers, uint64_t* values) const {
    for (std::size_t i = 0; i < op.args.size(); ++i) {
        Arg const arg = op.args[i];
        void const* pointer = nullptr;
        switch (arg.kind) {
            case ArgKind::kInput:
                pointer = buffers.inputs[0];
                break;
            case ArgKind::kOutput:
                pointer = buffers.outputs[0];
                break;
            case ArgKind::kResidual:
                pointer = buffers.inputs[1];
                break;
            case ArgKind::kConstant:
                pointer = buffers.inputs[node_->firstConstant() + arg.index];
                break;
            case ArgKind::kWorkspace:
                pointer = static_cast<char*>(buffers.workspace) + arg.index;
                break;
            default: {
                auto const variable = static_cast<std::size_t>(arg.kind) - static_cast<std::size_t>(ArgKind::kN);
                auto const size = static_cast<int32_t>(sizes[variable]);
                std::memcpy(&values[i], &size, sizeof(size));
                continue;
            }
        }
        values[i] = reinterpret_cast<uintptr_t>(pointer);
    }
}

void Instance::launch(Program const& program, Op const& op, cuda::Function function, Sizes const& sizes,
                      Buffers const& buffers) const {
    uint64_t values[kMaxArgs];
    void* pointers[kMaxArgs];
    gather(op, sizes, buffers, values);
    for (std::size_t i = 0; i < op.args.size(); ++i) pointers[i] = &values[i];
    unsigned grid[3];
    for (std::size_t i = 0; i < 3; ++i) grid[i] = gridSize(op, i, sizes);
    cuda::LaunchAttribute attributes[2];
    cuda::LaunchConfig const config{
        {grid[0], grid[1], grid[2]},
        {static_cast<unsigned>(op.block[0]), static_cast<unsigned>(op.block[1]), static_cast<unsigned>(op.block[2])},
        static_cast<unsigned>(op.sharedBytes),
        buffers.stream,
        attributes,
        attributesOf(op, program, attributes)};
    cuda::Driver const& driver = *program.driver;
    // Older drivers lack launchEx: it is called only where an attribute needs it.
    cuda::Result const result =
        config.count ? driver.launchEx(&config, function, pointers, nullptr)
                     : driver.launch(function, grid[0], grid[1], grid[2], config.block[0], config.block[1],
                                     config.block[2], config.sharedBytes, config.stream, pointers, nullptr);
    if (result != cuda::kSuccess) cuda::check(driver, result, "launching kernel " + op.entry);
}

void Instance::run(Precision precision, Shape const& input, Buffers const& buffers) const {
    if (input.d[0] == 0) return;
    Program const* program = programs_[static_cast<std::size_t>(precision)].get();
    if (!program) {
        throw Error(
            "it was asked to run before it was attached to a CUDA context (V2: initialize, V3: "
            "attachToContext).");
    }
    int32_t const chosen = chooseVariant(node_->plan(), precision, input.d[0]);
    if (chosen < 0) checkBatches(precision, input.d[0], input.d[0]);
    Variant const& variant = node_->plan()[static_cast<std::size_t>(chosen)];
    Sizes const sizes = this->sizes(input.d[0], input.d[2], input.d[3]);
    int64_t const room = variant.workspace.value(sizes);
    if (room > 0 && !buffers.workspace)
        throw Error("it was given no workspace, needed " + std::to_string(room) + " bytes.");
    for (std::size_t i = 0; i < variant.ops.size(); ++i) {
        Op const& op = variant.ops[i];
        if (!op.isMemset) {
            launch(*program, op, program->functions[static_cast<std::size_t>(chosen)][i], sizes, buffers);
            continue;
        }
        int64_t const bytes = op.bytes.value(sizes);
        if (bytes < 0 || bytes > room - op.offset) throw Error("its plan clears bytes beyond its workspace.");
        if (bytes == 0) continue;
        auto const address = static_cast<cuda::Address>(reinterpret_cast<uintptr_t>(buffers.workspace));
        cuda::Result const result = program->driver->memset8(address + static_cast<cuda::Address>(op.offset), 0,
                                                             static_cast<std::size_t>(bytes), buffers.stream);
        if (result != cuda::kSuccess) cuda::check(*program->driver, result, "cuMemsetD8Async");
    }
}

}  // namespace sparsedeploy
