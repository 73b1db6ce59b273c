#include "plan.h"

#include <algorithm>

namespace sparsedeploy {

char const* nameOf(Precision precision) { return precision == Precision::kFp32 ? "fp32" : "fp16"; }

int32_t Words::next() {
    if (atEnd()) throw Error("the launch plan ends early");
    return words_[at_++];
}

int32_t Words::count() {
    int32_t const count = next();
    if (count < 0) throw Error("the launch plan holds a list of " + std::to_string(count) + " elements");
    return count;
}

int32_t Words::pick(int32_t known, char const* what) {
    int32_t const code = next();
    if (code < 0 || code >= known) {
        throw Error("the launch plan holds " + std::string(what) + " " + std::to_string(code) + ", known are 0.." +
                    std::to_string(known - 1));
    }
    return code;
}

namespace {

bool isOperand(int32_t code) {
    return code == static_cast<int32_t>(Operator::kConst) || code == static_cast<int32_t>(Operator::kVar);
}

/// Whether the operator at `at` is one, with its operand if it takes one.
bool isKnown(std::vector<int32_t> const& code, std::size_t at) {
    if (!isOperand(code[at])) {
        return code[at] >= static_cast<int32_t>(Operator::kAdd) && code[at] <= static_cast<int32_t>(Operator::kMax);
    }
    if (at + 1 >= code.size()) return false;
    bool const isConst = code[at] == static_cast<int32_t>(Operator::kConst);
    return isConst || (code[at + 1] >= 0 && code[at + 1] < kVariables);
}

std::string shown(std::vector<int32_t> const& code) {
    std::string text = "(";
    for (std::size_t i = 0; i < code.size() && i < 32; ++i) text += (i ? ", " : "") + std::to_string(code[i]);
    return text + (code.size() > 32 ? ", ...)" : ")");
}

int64_t divide(int64_t a, int64_t b, bool up) {
    if (b == 0) throw Error("the launch plan divides by zero");
    if (a == INT64_MIN && b == -1) throw Error("the launch plan holds a size beyond 64 bits");
    int64_t const quotient = a / b;
    if (a % b == 0) return quotient;
    bool const positive = (a < 0) == (b < 0);
    return quotient + (up ? (positive ? 1 : 0) : (positive ? 0 : -1));
}

int64_t apply(Operator op, int64_t a, int64_t b) {
    int64_t result = 0;
    bool overflow = false;
    switch (op) {
        case Operator::kAdd:
            overflow = __builtin_add_overflow(a, b, &result);
            break;
        case Operator::kSub:
            overflow = __builtin_sub_overflow(a, b, &result);
            break;
        case Operator::kMul:
            overflow = __builtin_mul_overflow(a, b, &result);
            break;
        case Operator::kDiv:
            return divide(a, b, false);
        case Operator::kCeilDiv:
            return divide(a, b, true);
        case Operator::kMin:
            return std::min(a, b);
        default:
            return std::max(a, b);
    }
    if (overflow) throw Error("the launch plan holds a size beyond 64 bits");
    return result;
}

Op readOp(Words& words) {
    Op op;
    op.isMemset = words.pick(2, "op") == 1;
    if (op.isMemset) {
        op.offset = words.next();
        op.bytes = Expr::read(words);
        return op;
    }
    bool ascii = true;
    for (int32_t letters = words.count(); letters > 0; --letters) {
        int32_t const letter = words.next();
        ascii = ascii && letter > 0 && letter < 128;
        op.entry += static_cast<char>(letter);
    }
    if (!ascii) throw Error("the launch plan holds an entry name that is not ASCII");
    for (Expr& size : op.grid) size = Expr::read(words);
    for (int32_t& size : op.block) size = words.next();
    op.sharedBytes = words.next();
    op.cluster = words.next();
    op.dependent = words.next() != 0;
    for (int32_t args = words.count(); args > 0; --args) {
        auto const kind = static_cast<ArgKind>(words.pick(static_cast<int32_t>(ArgKind::kW) + 1, "argument"));
        op.args.push_back(Arg{kind, words.next()});
    }
    return op;
}

Variant readVariant(Words& words) {
    Variant variant;
    variant.precision = static_cast<Precision>(words.pick(kPrecisions, "dtype"));
    variant.minN = words.next();
    variant.maxN = words.next();
    variant.workspace = Expr::read(words);
    for (int32_t ops = words.count(); ops > 0; --ops) variant.ops.push_back(readOp(words));
    return variant;
}

}  // namespace

Expr Expr::read(Words& words) {
    Expr expr;
    // Nothing is reserved: a damaged length must not become an allocation.
    for (int32_t length = words.count(); length > 0; --length) expr.code_.push_back(words.next());
    int32_t depth = 0;
    for (std::size_t at = 0; at < expr.code_.size();) {
        bool const operand = isOperand(expr.code_[at]);
        depth += operand ? 1 : -1;
        if (!isKnown(expr.code_, at) || depth < 1) {
            throw Error("the launch plan holds the malformed expression " + shown(expr.code_));
        }
        if (depth > kDepth) throw Error("the launch plan holds an expression deeper than " + std::to_string(kDepth));
        at += operand ? 2 : 1;
    }
    if (depth != 1) throw Error("the launch plan holds the malformed expression " + shown(expr.code_));
    return expr;
}

int64_t Expr::value(Sizes const& sizes) const {
    int64_t stack[kDepth];
    int32_t top = 0;
    for (std::size_t at = 0; at < code_.size();) {
        auto const op = static_cast<Operator>(code_[at]);
        if (op == Operator::kConst || op == Operator::kVar) {
            int32_t const operand = code_[at + 1];
            stack[top++] = op == Operator::kConst ? operand : sizes[static_cast<std::size_t>(operand)];
            at += 2;
        } else {
            --top;
            stack[top - 1] = apply(op, stack[top - 1], stack[top]);
            at += 1;
        }
    }
    return top ? stack[0] : 0;
}

Plan decodePlan(std::vector<int32_t> const& words) {
    Words reader(words);
    Plan plan;
    for (int32_t variants = reader.count(); variants > 0; --variants) plan.push_back(readVariant(reader));
    if (!reader.atEnd()) throw Error("the launch plan has words left over");
    return plan;
}

int32_t chooseVariant(Plan const& plan, Precision precision, int64_t n) {
    for (std::size_t i = 0; i < plan.size(); ++i) {
        if (plan[i].fits(precision, n)) return static_cast<int32_t>(i);
    }
    return -1;
}

}  // namespace sparsedeploy
