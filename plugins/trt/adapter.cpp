#include "adapter.h"

#include <cstdint>
#include <cstring>

namespace sparsedeploy {

namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

constexpr char kChosenField[] = "chosen";

PluginFieldType typeOf(FieldType type) {
    return type == FieldType::kInts   ? PluginFieldType::kINT32
           : type == FieldType::kText ? PluginFieldType::kCHAR
                                      : PluginFieldType::kINT8;
}

std::vector<int32_t> readInts(PluginField const& field) {
    auto const count = static_cast<std::size_t>(field.length);
    std::vector<int32_t> ints(count);
    if (field.type == PluginFieldType::kINT32) {
        if (count) std::memcpy(ints.data(), field.data, count * sizeof(int32_t));  // it may lie at any address
        return ints;
    }
#if NV_TENSORRT_MAJOR >= 10
    if (field.type == PluginFieldType::kINT64) {
        for (std::size_t i = 0; i < count; ++i) {
            int64_t wide;
            std::memcpy(&wide, static_cast<char const*>(field.data) + i * sizeof(wide), sizeof(wide));
            if (wide < INT32_MIN || wide > INT32_MAX) {
                throw Error("field " + std::string(field.name) + " holds " + std::to_string(wide) +
                            ", which does not fit INT32");
            }
            ints[i] = static_cast<int32_t>(wide);
        }
        return ints;
    }
#endif
    throw Error("field " + std::string(field.name) + " has type " + std::to_string(static_cast<int>(field.type)) +
                ", needed integers");
}

Field readField(PluginField const& from, FieldType type) {
    Field field;
    field.present = true;
    if (from.length < 0 || (from.length > 0 && !from.data)) {
        throw Error("field " + std::string(from.name) + " has no data");
    }
    if (type == FieldType::kInts) {
        field.ints = readInts(from);
        return field;
    }
    bool const isBytes = from.type == PluginFieldType::kCHAR || from.type == PluginFieldType::kINT8;
    if (!isBytes) {
        throw Error("field " + std::string(from.name) + " has type " + std::to_string(static_cast<int>(from.type)) +
                    ", needed bytes");
    }
    field.bytes.assign(static_cast<char const*>(from.data), static_cast<std::size_t>(from.length));
    // Some parsers count a terminating NUL, some do not.
    while (type == FieldType::kText && !field.bytes.empty() && field.bytes.back() == '\0') field.bytes.pop_back();
    return field;
}

}  // namespace

nvinfer1::PluginFieldCollection const& fieldNames() {
    struct Names {
        std::vector<PluginField> fields;
        nvinfer1::PluginFieldCollection collection{};
        Names() {
            for (FieldSpec const& spec : kFields) {
                fields.emplace_back(spec.name, nullptr, typeOf(spec.type), spec.count ? spec.count : 1);
            }
            collection.nbFields = static_cast<int32_t>(fields.size());
            collection.fields = fields.data();
        }
    };
    static Names const* const names = new Names();
    return names->collection;
}

std::shared_ptr<Node const> readNode(nvinfer1::PluginFieldCollection const* collection, int32_t& chosen) {
    Fields fields;
    chosen = -1;
    for (int32_t i = 0; collection && i < collection->nbFields; ++i) {
        PluginField const& from = collection->fields[i];
        if (!from.name) continue;
        if (std::strcmp(from.name, kChosenField) == 0) {
            std::vector<int32_t> const value = readField(from, FieldType::kInts).ints;
            if (value.size() != 1 || value[0] < -1 || value[0] >= kPrecisions) {
                throw Error("field chosen holds an unknown precision");
            }
            chosen = value[0];
            continue;
        }
        std::size_t const number = fieldNumber(from.name);
        // A parser may add fields of its own (plugin_version, aot): those are nobody's business here.
        if (number < kFieldCount) fields[number] = readField(from, kFields[number].type);
    }
    return Node::read(std::move(fields));
}

Shape shapeOf(nvinfer1::Dims const& dims) {
    Shape shape;
    shape.rank = std::min<int32_t>(dims.nbDims, Shape::kMaxRank);
    for (int32_t i = 0; i < shape.rank; ++i) shape.d[i] = dims.d[i];
    return shape;
}

Precision precisionOf(nvinfer1::DataType type) {
    if (type == nvinfer1::DataType::kFLOAT) return Precision::kFp32;
    if (type == nvinfer1::DataType::kHALF) return Precision::kFp16;
    throw Error("its input has TensorRT data type " + std::to_string(static_cast<int>(type)) +
                ", needed FLOAT (0) or HALF (1).");
}

bool offersFormat(Node const& node, int32_t pos, nvinfer1::PluginTensorDesc const& tensor,
                  nvinfer1::PluginTensorDesc const& input) {
    if (tensor.format != nvinfer1::TensorFormat::kLINEAR) return false;
    bool const isConstant = pos >= node.firstConstant() && pos < node.inputs();
    if (isConstant) return tensor.type == nvinfer1::DataType::kINT32;
    bool const isFloat = tensor.type == nvinfer1::DataType::kFLOAT || tensor.type == nvinfer1::DataType::kHALF;
    return isFloat && tensor.type == input.type && node.offers(precisionOf(tensor.type));
}

void checkCounts(Node const& node, int32_t inputs, int32_t outputs) {
    if (inputs == node.inputs() && outputs == 1) return;
    throw Error("the node has " + std::to_string(inputs) + " inputs and " + std::to_string(outputs) +
                " outputs, its fields say " + std::to_string(node.inputs()) +
                " and 1. Use the model as it was written.");
}

nvinfer1::DimsExprs outputShape(Instance const& instance, nvinfer1::DimsExprs const& input,
                                nvinfer1::IExprBuilder& builder) {
    using nvinfer1::DimensionOperation;
    Geometry const& g = instance.node().geometry();
    Shape known;
    known.rank = std::min<int32_t>(input.nbDims, Shape::kMaxRank);
    for (int32_t i = 0; i < known.rank; ++i) {
        known.d[i] = input.d[i] && input.d[i]->isConstant() ? input.d[i]->getConstantValue() : -1;
    }
    instance.checkInput(known);
    auto const strided = [&builder](nvinfer1::IDimensionExpr const& size, int32_t less, int32_t stride) {
        auto const* const room = builder.operation(DimensionOperation::kSUB, size, *builder.constant(less));
        auto const* const steps = builder.operation(DimensionOperation::kFLOOR_DIV, *room, *builder.constant(stride));
        return builder.operation(DimensionOperation::kSUM, *steps, *builder.constant(1));
    };
    nvinfer1::DimsExprs output{};
    output.nbDims = 4;
    output.d[0] = input.d[0];
    output.d[1] = builder.constant(g.oc);
    if (instance.node().fixedHw()) {
        output.d[2] = builder.constant(static_cast<int32_t>(instance.outputHeight(g.h)));
        output.d[3] = builder.constant(static_cast<int32_t>(instance.outputWidth(g.w)));
    } else {
        output.d[2] = strided(*input.d[2], g.dilationH * (g.kh - 1) + 1 - g.top - g.bottom, g.strideH);
        output.d[3] = strided(*input.d[3], g.dilationW * (g.kw - 1) + 1 - g.left - g.right, g.strideW);
    }
    return output;
}

}  // namespace sparsedeploy
