// The SparseConv2d node: its fields in the order of plugins/node.py, decoded and checked. Immutable once read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan.h"

namespace sparsedeploy {

constexpr char kPluginName[] = "SparseConv2d";
constexpr char kPluginVersion[] = "1";
constexpr char kPluginNamespace[] = "";
/// Raised whenever a field changes its meaning; any other is refused.
constexpr int32_t kAbiVersion = 1;

enum class FieldType : int32_t { kText, kInts, kBytes };

struct FieldSpec {
    char const* name;
    FieldType type;
    /// How many integers it holds; 0: a list, never empty.
    int32_t count;
};

// In the order of SparseConv.fields(); tests/plugins/test_trt_plan.py compares them.
constexpr FieldSpec kFields[] = {
    {"abi", FieldType::kInts, 1},         {"layer", FieldType::kText, 0},       {"kernel", FieldType::kText, 0},
    {"precision", FieldType::kInts, 1},   {"geometry", FieldType::kInts, 15},   {"fixed_hw", FieldType::kInts, 1},
    {"epilogue", FieldType::kInts, 6},    {"constants", FieldType::kInts, 1},   {"parameters", FieldType::kInts, 0},
    {"launch_plan", FieldType::kInts, 0}, {"image_table", FieldType::kInts, 0}, {"images", FieldType::kBytes, 0},
};
constexpr std::size_t kFieldCount = sizeof(kFields) / sizeof(kFields[0]);

/// Place in kFields, or kFieldCount for a name that is no field.
std::size_t fieldNumber(char const* name);

/// One field as it travels: `ints` for kInts, `bytes` for the others (text without its NUL).
struct Field {
    bool present = false;
    std::vector<int32_t> ints;
    std::string bytes;
};
using Fields = std::array<Field, kFieldCount>;

struct Geometry {
    int32_t oc, ic, kh, kw, h, w, strideH, strideW, top, left, bottom, right, dilationH, dilationW, group;
};

enum class ImageKind : int32_t { kPtx, kCubin };

struct Image {
    /// Compute capability times ten.
    int32_t arch;
    Precision precision;
    ImageKind kind;
    /// Within the field `images`, deflated.
    std::size_t offset, packedSize;
    std::size_t size;
    uint64_t hash;
};

/// What one node says and carries; shared by every clone of a plugin, never changed.
class Node {
  public:
    /// Error naming the field that is missing, malformed or of another ABI.
    static std::shared_ptr<Node const> read(Fields fields);
    /// Inverse of `serialise`. `chosen` receives what was stored with it.
    static std::shared_ptr<Node const> deserialise(void const* data, std::size_t size, int32_t& chosen);

    /// The fields as one blob, with the precision that TensorRT chose (-1: none yet).
    std::string serialise(int32_t chosen) const;
    std::size_t serialisedSize() const;

    Fields const& fields() const { return fields_; }
    std::string const& layer() const { return fields_[1].bytes; }
    std::string const& kernel() const { return fields_[2].bytes; }
    Geometry const& geometry() const { return geometry_; }
    bool fixedHw() const { return fixedHw_; }
    bool hasResidual() const { return residual_; }
    int32_t constants() const { return constants_; }
    Plan const& plan() const { return plan_; }
    std::vector<Image> const& images() const { return images_; }
    char const* packed(Image const& image) const { return fields_[kFieldCount - 1].bytes.data() + image.offset; }
    /// Whether the node has both a plan and code for activations of this type.
    bool offers(Precision precision) const;
    /// Of everything the fields hold: equal nodes have equal hashes.
    uint64_t hash() const { return hash_; }

    /// X, the residual if one is added, the constants.
    int32_t inputs() const { return 1 + (residual_ ? 1 : 0) + constants_; }
    int32_t firstConstant() const { return residual_ ? 2 : 1; }

  private:
    Node() = default;
    void readImages();
    void checkPlan() const;

    Fields fields_;
    Geometry geometry_{};
    bool fixedHw_ = true, residual_ = false;
    int32_t constants_ = 0;
    Plan plan_;
    std::vector<Image> images_;
    uint64_t hash_ = 0;
};

}  // namespace sparsedeploy
