// IPluginV2DynamicExt for TensorRT 8: one build serves 8.0 to 8.6, whose tables of virtual functions are the same.
#include "adapter.h"

#if SPARSEDEPLOY_ADAPTER == 2

#include <cstring>

namespace sparsedeploy {

namespace {

using namespace nvinfer1;

constexpr int32_t kRefused = 1;

class PluginV2 : public IPluginV2DynamicExt {
  public:
    explicit PluginV2(Instance const& instance) : instance_(instance) {}

    IPluginV2DynamicExt* clone() const noexcept override {
        return guarded<IPluginV2DynamicExt*>(node(), nullptr, [this] { return new PluginV2(*this); });
    }
    void destroy() noexcept override { delete this; }

    AsciiChar const* getPluginType() const noexcept override { return kPluginName; }
    AsciiChar const* getPluginVersion() const noexcept override { return kPluginVersion; }
    void setPluginNamespace(AsciiChar const* name) noexcept override { namespace_ = name ? name : ""; }
    AsciiChar const* getPluginNamespace() const noexcept override { return namespace_.c_str(); }
    int32_t getNbOutputs() const noexcept override { return 1; }

    /// TensorRT 8 shows half as float here and wants float back; supportsFormatCombination decides the real type.
    DataType getOutputDataType(int32_t, DataType const* inputs, int32_t) const noexcept override { return inputs[0]; }

    DimsExprs getOutputDimensions(int32_t, DimsExprs const* inputs, int32_t nbInputs,
                                  IExprBuilder& builder) noexcept override {
        // There is no way to refuse here. Wrong inputs are logged now and refused in supportsFormatCombination.
        DimsExprs same = inputs[0];
        return guarded(node(), same, [&] {
            checkCounts(node(), nbInputs, 1);
            return outputShape(instance_, inputs[0], builder);
        });
    }

    bool supportsFormatCombination(int32_t pos, PluginTensorDesc const* tensors, int32_t nbInputs,
                                   int32_t nbOutputs) noexcept override {
        return guarded(node(), false, [&] {
            checkCounts(node(), nbInputs, nbOutputs);
            // At the last tensor all shapes are known: TensorRT checks no residual against the output itself.
            if (pos == nbInputs) checkDims(tensors, tensors + nbInputs);
            return offersFormat(node(), pos, tensors[pos], tensors[0]);
        });
    }

    void configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t, DynamicPluginTensorDesc const*,
                         int32_t) noexcept override {
        guarded(node(), kRefused, [&] {
            Precision const precision = precisionOf(inputs[0].desc.type);
            instance_.checkBatches(precision, inputs[0].min.d[0], inputs[0].max.d[0]);
            instance_.choose(precision);
            if (isInitialised_) instance_.load(precision);
            return 0;
        });
    }

    size_t getWorkspaceSize(PluginTensorDesc const* inputs, int32_t, PluginTensorDesc const*,
                            int32_t) const noexcept override {
        return guarded<size_t>(node(), 0, [&] {
            Shape const most = shapeOf(inputs[0].dims);
            return instance_.workspace(precisionOf(inputs[0].type), most.d[0], most.d[2], most.d[3]);
        });
    }

    int32_t initialize() noexcept override {
        return guarded(node(), kRefused, [this] {
            instance_.load();
            isInitialised_ = true;
            return 0;
        });
    }
    void terminate() noexcept override {
        instance_.unload();
        isInitialised_ = false;
    }

    int32_t enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const* outputDesc, void const* const* inputs,
                    void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
        return guarded(node(), kRefused, [&] {
            checkDims(inputDesc, outputDesc);
            Precision const precision = precisionOf(inputDesc[0].type);
            // Loaded long since, unless this TensorRT configures after it initialises a plugin that it restored.
            if (isInitialised_) instance_.load(precision);
            instance_.run(precision, shapeOf(inputDesc[0].dims),
                          Buffers{inputs, outputs, workspace, reinterpret_cast<cuda::Stream>(stream)});
            return 0;
        });
    }

    size_t getSerializationSize() const noexcept override { return node().serialisedSize(); }
    void serialize(void* buffer) const noexcept override {
        guarded(node(), kRefused, [&] {
            std::string const blob = node().serialise(instance_.chosen());
            std::memcpy(buffer, blob.data(), blob.size());
            return 0;
        });
    }

  private:
    Node const& node() const { return instance_.node(); }

    void checkDims(PluginTensorDesc const* inputs, PluginTensorDesc const* outputs) const {
        Shape const residual = node().hasResidual() ? shapeOf(inputs[1].dims) : Shape{};
        instance_.checkShapes(shapeOf(inputs[0].dims), node().hasResidual() ? &residual : nullptr,
                              shapeOf(outputs[0].dims));
    }

    Instance instance_;
    bool isInitialised_ = false;
    std::string namespace_ = kPluginNamespace;
};

class CreatorV2 : public IPluginCreator {
  public:
    AsciiChar const* getPluginName() const noexcept override { return kPluginName; }
    AsciiChar const* getPluginVersion() const noexcept override { return kPluginVersion; }
    void setPluginNamespace(AsciiChar const* name) noexcept override { namespace_ = name ? name : ""; }
    AsciiChar const* getPluginNamespace() const noexcept override { return namespace_.c_str(); }
    PluginFieldCollection const* getFieldNames() noexcept override { return &fieldNames(); }

    IPluginV2* createPlugin(AsciiChar const* name, PluginFieldCollection const* fields) noexcept override {
        return created(name, [fields](int32_t& chosen) { return readNode(fields, chosen); });
    }
    IPluginV2* deserializePlugin(AsciiChar const* name, void const* data, size_t size) noexcept override {
        return created(name, [data, size](int32_t& chosen) { return Node::deserialise(data, size, chosen); });
    }

  private:
    template <typename Read>
    IPluginV2* created(AsciiChar const* name, Read const& read) const noexcept {
        try {
            int32_t chosen = -1;
            auto const node = read(chosen);
            std::unique_ptr<PluginV2> plugin(new PluginV2(Instance(node, chosen)));
            plugin->setPluginNamespace(namespace_.c_str());
            return plugin.release();
        } catch (std::exception const& error) {
            logError("SparseConv2d " + std::string(name ? name : "") + ": " + error.what());
            return nullptr;
        }
    }

    std::string namespace_ = kPluginNamespace;
};

}  // namespace

CreatorBase& creator() {
    static CreatorV2* const creator = new CreatorV2();
    return *creator;
}

}  // namespace sparsedeploy

#endif  // SPARSEDEPLOY_ADAPTER
