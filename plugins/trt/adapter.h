// What the adapters of both plugin generations share: fields and shapes in and out of TensorRT's types.
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "NvInferRuntime.h"
#include "core.h"
#include "log.h"

// 3: IPluginV3 (TensorRT 10, 11, TensorRT-RTX). 2: IPluginV2DynamicExt (TensorRT 8; deprecated in 10).
#ifndef SPARSEDEPLOY_ADAPTER
#if NV_TENSORRT_MAJOR >= 10
#define SPARSEDEPLOY_ADAPTER 3
#else
#define SPARSEDEPLOY_ADAPTER 2
#endif
#endif

namespace sparsedeploy {

#if SPARSEDEPLOY_ADAPTER == 3
using CreatorBase = nvinfer1::IPluginCreatorInterface;
#else
using CreatorBase = nvinfer1::IPluginCreator;
#endif

/// The one creator of this library. Never destroyed: TensorRT may look at it after static destructors have run.
CreatorBase& creator();

/// The fields that a creator asks for, in order.
nvinfer1::PluginFieldCollection const& fieldNames();

/// Decode what a parser or an engine hands over. `chosen` receives the field of that name, or -1.
std::shared_ptr<Node const> readNode(nvinfer1::PluginFieldCollection const* collection, int32_t& chosen);

Shape shapeOf(nvinfer1::Dims const& dims);
/// Error for a type that is neither float nor half.
Precision precisionOf(nvinfer1::DataType type);

/// Whether tensor `pos` may have this type and format, given those before it.
bool offersFormat(Node const& node, int32_t pos, nvinfer1::PluginTensorDesc const& tensor,
                  nvinfer1::PluginTensorDesc const& input);

/// Error unless the node has this many inputs and outputs.
void checkCounts(Node const& node, int32_t inputs, int32_t outputs);

/// The output's shape in TensorRT's symbols. Error when the input is not what the layer takes.
nvinfer1::DimsExprs outputShape(Instance const& instance, nvinfer1::DimsExprs const& input,
                                nvinfer1::IExprBuilder& builder);

/// Runs `body`, whose exceptions must not reach TensorRT: they are logged with the layer's name, `refused` returned.
template <typename Result, typename Body>
Result guarded(Node const& node, Result refused, Body const& body) noexcept {
    try {
        return body();
    } catch (std::exception const& error) {
        logError("SparseConv2d " + node.layer() + ": " + error.what());
        return refused;
    }
}

}  // namespace sparsedeploy
