// What every adapter shares: a node made ready on a context, and one plugin object's state. Knows no TensorRT header.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "driver.h"
#include "params.h"

namespace sparsedeploy {

struct Shape {
    static constexpr int32_t kMaxRank = 8;
    int32_t rank = 0;
    int64_t d[kMaxRank] = {};
};
bool operator==(Shape const& a, Shape const& b);
std::string shown(Shape const& shape);

/// A loaded image; unloaded with its last user. Shared by every node of the process that carries the same bytes.
class LoadedImage;

/// One node's code for one precision, ready on one context: images loaded, entries found and configured.
struct Program {
    cuda::Driver const* driver;
    std::shared_ptr<LoadedImage const> image;
    /// By variant and op; null where a variant has another precision and where an op is a memset.
    std::vector<std::vector<cuda::Function>> functions;
    /// Compute capability 9.0 and later: clusters and dependent launches.
    bool isHopper;
};

/// Make `node` ready on the calling thread's current context. Error when the device or the driver cannot run it.
std::shared_ptr<Program const> prepare(std::shared_ptr<Node const> const& node, Precision precision);

/// The image a device runs: the cubin made for it, else the newest PTX that is not newer than it.
/// Error listing the architectures inside and the device's.
Image const& pickImage(Node const& node, Precision precision, int32_t capability);

/// What one run is given.
struct Buffers {
    void const* const* inputs;
    void* const* outputs;
    void* workspace;
    cuda::Stream stream;
};

/// One plugin object. A copy is a clone: it shares the node and whatever is loaded.
class Instance {
  public:
    explicit Instance(std::shared_ptr<Node const> node, int32_t chosen = -1)
        : node_(std::move(node)), chosen_(chosen) {}

    Node const& node() const { return *node_; }
    /// The precision that TensorRT chose, or -1.
    int32_t chosen() const { return chosen_; }
    void choose(Precision precision) { chosen_ = static_cast<int32_t>(precision); }

    /// Error unless the input has the layer's channels and, if the kernel runs one size only, its height and width.
    /// A size of -1 is not known yet and passes.
    void checkInput(Shape const& input) const;
    /// Output height and width for an input's.
    int64_t outputHeight(int64_t height) const;
    int64_t outputWidth(int64_t width) const;
    /// Error unless input, residual (null: none) and output fit each other.
    void checkShapes(Shape const& input, Shape const* residual, Shape const& output) const;
    /// Error unless the plan runs every batch from `minN` to `maxN`.
    void checkBatches(Precision precision, int64_t minN, int64_t maxN) const;
    /// Bytes of workspace: the most that any batch up to `maxN` takes. Height and width are the largest.
    std::size_t workspace(Precision precision, int64_t maxN, int64_t height, int64_t width) const;

    /// Load on the current context whatever `choose` said, or all that the device can run when nothing was said.
    void load();
    /// Load one precision unless it is loaded.
    void load(Precision precision);
    bool isLoaded(Precision precision) const { return programs_[static_cast<std::size_t>(precision)] != nullptr; }
    void unload() { programs_ = {}; }

    /// Put the node's work on the stream. Allocates nothing and waits for nothing; Error on wrong sizes and when the
    /// driver refuses a launch.
    void run(Precision precision, Shape const& input, Buffers const& buffers) const;

  private:
    Sizes sizes(int64_t n, int64_t height, int64_t width) const;
    /// The launch's parameters, each in its own 64 bits.
    void gather(Op const& op, Sizes const& sizes, Buffers const& buffers, uint64_t* values) const;
    void launch(Program const& program, Op const& op, cuda::Function function, Sizes const& sizes,
                Buffers const& buffers) const;

    std::shared_ptr<Node const> node_;
    int32_t chosen_;
    std::array<std::shared_ptr<Program const>, kPrecisions> programs_;
};

}  // namespace sparsedeploy
