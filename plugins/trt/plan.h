// Launch plans: decoded from the INT32 words that plugins/launch.py encodes, evaluated over the sizes of one call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace sparsedeploy {

/// What a file holds or a machine lacks, in words; the adapters put the layer's name in front and log it.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The enumerations have the orders of node.py and launch.py; tests/plugins/test_trt_plan.py compares them.
enum class Precision : int32_t { kFp32, kFp16 };
constexpr int32_t kPrecisions = 2;
char const* nameOf(Precision precision);

enum class Variable : int32_t { kN, kH, kW, kOH, kOW };
constexpr int32_t kVariables = 5;
using Sizes = std::array<int64_t, kVariables>;

enum class Operator : int32_t { kConst, kVar, kAdd, kSub, kMul, kDiv, kCeilDiv, kMin, kMax };

enum class ArgKind : int32_t { kInput, kOutput, kResidual, kConstant, kWorkspace, kN, kH, kW };

/// Reads words in order; Error when they end early or mean nothing.
class Words {
  public:
    explicit Words(std::vector<int32_t> const& words) : words_(words) {}
    int32_t next();
    /// A list's length.
    int32_t count();
    /// One of `known` codes, counted from 0.
    int32_t pick(int32_t known, char const* what);
    bool atEnd() const { return at_ == words_.size(); }

  private:
    std::vector<int32_t> const& words_;
    std::size_t at_ = 0;
};

/// An integer expression in postfix code.
class Expr {
  public:
    /// Deepest stack that an expression may need: evaluating one inside enqueue must not allocate.
    static constexpr int32_t kDepth = 64;

    /// Error unless the code leaves exactly one value, so that evaluating it cannot run off the stack.
    static Expr read(Words& words);
    /// In 64 bits, quotients rounded down; Error for a zero divisor and for a result beyond 64 bits.
    int64_t value(Sizes const& sizes) const;

  private:
    std::vector<int32_t> code_;
};

struct Arg {
    ArgKind kind;
    /// The constant's number, or the byte offset into the workspace.
    int32_t index;
};

/// Most parameters of one launch: their values are gathered without allocating.
constexpr std::size_t kMaxArgs = 64;

/// A launch, or where `isMemset` a write of `bytes` zeros at `offset` of the workspace.
struct Op {
    bool isMemset = false;
    int32_t offset = 0;
    Expr bytes;
    std::string entry;
    std::array<Expr, 3> grid;
    std::array<int32_t, 3> block{};
    int32_t sharedBytes = 0;
    int32_t cluster = 1;
    bool dependent = false;
    std::vector<Arg> args;
};

struct Variant {
    Precision precision = Precision::kFp32;
    int32_t minN = 1;
    /// 0: no limit.
    int32_t maxN = 0;
    Expr workspace;
    std::vector<Op> ops;

    bool fits(Precision asked, int64_t n) const { return precision == asked && minN <= n && (maxN == 0 || n <= maxN); }
};

using Plan = std::vector<Variant>;

/// Inverse of launch.encode; Error when words are missing, left over or mean nothing.
Plan decodePlan(std::vector<int32_t> const& words);

/// Number of the first variant that fits, or -1.
int32_t chooseVariant(Plan const& plan, Precision precision, int64_t n);

}  // namespace sparsedeploy
