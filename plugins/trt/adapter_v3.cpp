// IPluginV3 for TensorRT 10, 11 and TensorRT-RTX.
#include "adapter.h"

#if SPARSEDEPLOY_ADAPTER == 3

namespace sparsedeploy {

namespace {

using namespace nvinfer1;

constexpr int32_t kRefused = 1;

class PluginV3 : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
  public:
    explicit PluginV3(Instance const& instance)
        : instance_(instance),
          metadata_("layer=" + instance.node().layer() + " kernel=" + instance.node().kernel()),
          timingId_("sparsedeploy-" + std::to_string(instance.node().hash())) {}

    IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
        switch (type) {
            case PluginCapabilityType::kCORE:
                return static_cast<IPluginV3OneCore*>(this);
            case PluginCapabilityType::kBUILD:
                return static_cast<IPluginV3OneBuild*>(this);
            case PluginCapabilityType::kRUNTIME:
                return static_cast<IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }

    IPluginV3* clone() noexcept override {
        return guarded<IPluginV3*>(node(), nullptr, [this] { return new PluginV3(instance_); });
    }

    AsciiChar const* getPluginName() const noexcept override { return kPluginName; }
    AsciiChar const* getPluginVersion() const noexcept override { return kPluginVersion; }
    AsciiChar const* getPluginNamespace() const noexcept override { return kPluginNamespace; }
    int32_t getNbOutputs() const noexcept override { return 1; }
    char const* getMetadataString() noexcept override { return metadata_.c_str(); }
    /// What the node's code is decides its time; TensorRT adds the shapes.
    char const* getTimingCacheID() noexcept override { return timingId_.c_str(); }

    int32_t getOutputDataTypes(DataType* outputs, int32_t nbOutputs, DataType const* inputs,
                               int32_t nbInputs) const noexcept override {
        return guarded(node(), kRefused, [&] {
            checkCounts(node(), nbInputs, nbOutputs);
            outputs[0] = inputs[0];
            return 0;
        });
    }

    int32_t getOutputShapes(DimsExprs const* inputs, int32_t nbInputs, DimsExprs const*, int32_t, DimsExprs* outputs,
                            int32_t nbOutputs, IExprBuilder& builder) noexcept override {
        return guarded(node(), kRefused, [&] {
            checkCounts(node(), nbInputs, nbOutputs);
            outputs[0] = outputShape(instance_, inputs[0], builder);
            return 0;
        });
    }

    bool supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* tensors, int32_t nbInputs,
                                   int32_t nbOutputs) noexcept override {
        return guarded(node(), false, [&] {
            checkCounts(node(), nbInputs, nbOutputs);
            return offersFormat(node(), pos, tensors[pos].desc, tensors[0].desc);
        });
    }

    int32_t configurePlugin(DynamicPluginTensorDesc const* inputs, int32_t nbInputs,
                            DynamicPluginTensorDesc const* outputs, int32_t nbOutputs) noexcept override {
        return guarded(node(), kRefused, [&] {
            checkCounts(node(), nbInputs, nbOutputs);
            Precision const precision = precisionOf(inputs[0].desc.type);
            // TensorRT checks no residual against the output; a smaller one would be read out of bounds.
            checkDims(inputs, outputs, [](DynamicPluginTensorDesc const& tensor) { return tensor.desc.dims; });
            // TensorRT-RTX leaves `min` unset; what is dynamic is -1 in `desc`.
            checkDims(inputs, outputs, [](DynamicPluginTensorDesc const& tensor) { return tensor.max; });
            instance_.checkBatches(precision, inputs[0].min.d[0], inputs[0].max.d[0]);
            instance_.choose(precision);
            return 0;
        });
    }

    size_t getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t, DynamicPluginTensorDesc const*,
                            int32_t) const noexcept override {
        return guarded<size_t>(node(), 0, [&] {
            Dims const& most = inputs[0].max;
            return instance_.workspace(precisionOf(inputs[0].desc.type), most.d[0], most.d[2], most.d[3]);
        });
    }

    int32_t onShapeChange(PluginTensorDesc const* inputs, int32_t nbInputs, PluginTensorDesc const* outputs,
                          int32_t nbOutputs) noexcept override {
        return guarded(node(), kRefused, [&] {
            checkCounts(node(), nbInputs, nbOutputs);
            checkDims(inputs, outputs, [](PluginTensorDesc const& tensor) { return tensor.dims; });
            Precision const precision = precisionOf(inputs[0].type);
            instance_.checkBatches(precision, inputs[0].dims.d[0], inputs[0].dims.d[0]);
            instance_.load(precision);
            return 0;
        });
    }

    int32_t enqueue(PluginTensorDesc const* inputDesc, PluginTensorDesc const*, void const* const* inputs,
                    void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
        return guarded(node(), kRefused, [&] {
            instance_.run(precisionOf(inputDesc[0].type), shapeOf(inputDesc[0].dims),
                          Buffers{inputs, outputs, workspace, reinterpret_cast<cuda::Stream>(stream)});
            return 0;
        });
    }

    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override {
        return guarded<IPluginV3*>(node(), nullptr, [this] {
            std::unique_ptr<PluginV3> attached(new PluginV3(instance_));
            attached->instance_.load();
            return attached.release();
        });
    }

    PluginFieldCollection const* getFieldsToSerialize() noexcept override {
        return guarded<PluginFieldCollection const*>(node(), nullptr, [this] {
            serialised_.clear();
            for (std::size_t i = 0; i < kFieldCount; ++i) {
                Field const& field = node().fields()[i];
                FieldType const type = kFields[i].type;
                if (type == FieldType::kInts) {
                    serialised_.emplace_back(kFields[i].name, field.ints.data(), PluginFieldType::kINT32,
                                             static_cast<int32_t>(field.ints.size()));
                } else {
                    // Text goes with its NUL, so that none is ever empty.
                    bool const isText = type == FieldType::kText;
                    serialised_.emplace_back(kFields[i].name, field.bytes.c_str(),
                                             isText ? PluginFieldType::kCHAR : PluginFieldType::kINT8,
                                             static_cast<int32_t>(field.bytes.size()) + (isText ? 1 : 0));
                }
            }
            chosen_ = instance_.chosen();
            serialised_.emplace_back("chosen", &chosen_, PluginFieldType::kINT32, 1);
            collection_.nbFields = static_cast<int32_t>(serialised_.size());
            collection_.fields = serialised_.data();
            return &collection_;
        });
    }

  private:
    Node const& node() const { return instance_.node(); }

    template <typename Tensor, typename DimsOf>
    void checkDims(Tensor const* inputs, Tensor const* outputs, DimsOf const& dimsOf) const {
        Shape const residual = node().hasResidual() ? shapeOf(dimsOf(inputs[1])) : Shape{};
        instance_.checkShapes(shapeOf(dimsOf(inputs[0])), node().hasResidual() ? &residual : nullptr,
                              shapeOf(dimsOf(outputs[0])));
    }

    Instance instance_;
    std::string metadata_, timingId_;
    // What getFieldsToSerialize points to.
    std::vector<PluginField> serialised_;
    PluginFieldCollection collection_{};
    int32_t chosen_ = -1;
};

class CreatorV3 : public IPluginCreatorV3One {
  public:
    AsciiChar const* getPluginName() const noexcept override { return kPluginName; }
    AsciiChar const* getPluginVersion() const noexcept override { return kPluginVersion; }
    AsciiChar const* getPluginNamespace() const noexcept override { return kPluginNamespace; }
    PluginFieldCollection const* getFieldNames() noexcept override { return &fieldNames(); }

    IPluginV3* createPlugin(AsciiChar const* name, PluginFieldCollection const* fields,
                            TensorRTPhase) noexcept override {
        try {
            int32_t chosen = -1;
            auto const node = readNode(fields, chosen);
            return new PluginV3(Instance(node, chosen));
        } catch (std::exception const& error) {
            logError("SparseConv2d " + std::string(name ? name : "") + ": " + error.what());
            return nullptr;
        }
    }
};

}  // namespace

CreatorBase& creator() {
    static CreatorV3* const creator = new CreatorV3();
    return *creator;
}

}  // namespace sparsedeploy

#endif  // SPARSEDEPLOY_ADAPTER
