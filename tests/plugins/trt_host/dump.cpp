// Says what the plugin's decoders make of plans, nodes and deflated data: one line in, one line of JSON out.
//   plan <words...> ; <N H W OH OW> ; <precision>      decoded and evaluated
//   node <fields file>                                   read, its images inflated; and once more after serialising
//   inflate <size> <hex>
//   names                                                the fields, in order
#include <iostream>

#include "fields_file.h"
#include "inflate.h"
#include "params.h"

using namespace sparsedeploy;

namespace {

std::string failure(std::exception const& error) { return "{\"error\": " + quoted(error.what()) + "}"; }

std::string value(Expr const& expr, Sizes const& sizes) {
    try {
        return std::to_string(expr.value(sizes));
    } catch (Error const& error) {
        return quoted(error.what());
    }
}

std::string shown(Op const& op, Sizes const& sizes) {
    if (op.isMemset)
        return "{\"offset\": " + std::to_string(op.offset) + ", \"bytes\": " + value(op.bytes, sizes) + "}";
    std::string out = "{\"entry\": " + quoted(op.entry) + ", \"grid\": [";
    for (std::size_t i = 0; i < 3; ++i) out += (i ? ", " : "") + value(op.grid[i], sizes);
    out += "], \"block\": [";
    for (std::size_t i = 0; i < 3; ++i) out += (i ? ", " : "") + std::to_string(op.block[i]);
    out += "], \"shared\": " + std::to_string(op.sharedBytes) + ", \"cluster\": " + std::to_string(op.cluster) +
           ", \"dependent\": " + (op.dependent ? "true" : "false") + ", \"args\": [";
    for (std::size_t i = 0; i < op.args.size(); ++i) {
        out += (i ? ", [" : "[") + std::to_string(static_cast<int>(op.args[i].kind)) + ", " +
               std::to_string(op.args[i].index) + "]";
    }
    return out + "]}";
}

std::string plan(std::istringstream& words) {
    std::vector<int32_t> code;
    for (std::string word; words >> word && word != ";";) code.push_back(static_cast<int32_t>(std::stoll(word)));
    Sizes sizes{};
    for (int64_t& size : sizes) words >> size;
    std::string skipped;
    int precision = 0;
    words >> skipped >> precision;
    Plan const decoded = decodePlan(code);
    std::string out =
        "{\"chosen\": " + std::to_string(chooseVariant(decoded, static_cast<Precision>(precision), sizes[0])) +
        ", \"variants\": [";
    for (std::size_t i = 0; i < decoded.size(); ++i) {
        Variant const& variant = decoded[i];
        out += std::string(i ? ", " : "") + "{\"dtype\": " + quoted(nameOf(variant.precision)) +
               ", \"min_n\": " + std::to_string(variant.minN) + ", \"max_n\": " + std::to_string(variant.maxN) +
               ", \"workspace\": " + value(variant.workspace, sizes) + ", \"ops\": [";
        for (std::size_t k = 0; k < variant.ops.size(); ++k) out += (k ? ", " : "") + shown(variant.ops[k], sizes);
        out += "]}";
    }
    return out + "]}";
}

std::string shown(Node const& node) {
    Geometry const& g = node.geometry();
    std::string out = "{\"layer\": " + quoted(node.layer()) + ", \"kernel\": " + quoted(node.kernel());
    out += ", \"geometry\": [";
    for (int32_t v : {g.oc, g.ic, g.kh, g.kw, g.h, g.w, g.strideH, g.strideW, g.top, g.left, g.bottom, g.right,
                      g.dilationH, g.dilationW, g.group}) {
        out += (out.back() == '[' ? "" : ", ") + std::to_string(v);
    }
    out += std::string("], \"fixed_hw\": ") + (node.fixedHw() ? "true" : "false") +
           ", \"residual\": " + (node.hasResidual() ? "true" : "false") +
           ", \"constants\": " + std::to_string(node.constants()) +
           ", \"variants\": " + std::to_string(node.plan().size()) + ", \"images\": [";
    for (Image const& image : node.images()) {
        out += std::string(out.back() == '[' ? "" : ", ") + "[" + std::to_string(image.arch) + ", " +
               quoted(nameOf(image.precision)) + ", " + (image.kind == ImageKind::kPtx ? "\"ptx\"" : "\"cubin\"") +
               ", " + quoted(toHex(inflate(node.packed(image), image.packedSize, image.size))) + "]";
    }
    return out + "]}";
}

std::string node(std::string const& path) {
    Fields fields;
    for (FileField const& from : readFieldsFile(path)) {
        std::size_t const number = fieldNumber(from.name.c_str());
        if (number == kFieldCount) continue;
        fields[number].present = true;
        if (kFields[number].type == FieldType::kInts) {
            fields[number].ints = asInts(from.bytes);
        } else {
            fields[number].bytes = from.bytes;
        }
    }
    auto const read = Node::read(fields);
    std::string const blob = read->serialise(1);
    int32_t chosen = -1;
    auto const again = Node::deserialise(blob.data(), blob.size(), chosen);
    if (chosen != 1 || again->serialise(1) != blob || blob.size() != read->serialisedSize() ||
        again->hash() != read->hash() || shown(*again) != shown(*read)) {
        throw Error("the node changes when it is serialised");
    }
    for (std::size_t cut = 0; cut < blob.size(); cut += 1 + cut / 8) {
        bool refused = false;
        try {
            Node::deserialise(blob.data(), cut, chosen);
        } catch (Error const&) {
            refused = true;
        }
        if (!refused) throw Error("a serialised node cut to " + std::to_string(cut) + " bytes is read");
    }
    // Damaged anywhere, it must be refused or read, never crash.
    for (std::size_t at = 0; at + 4 <= blob.size(); at += 4 * (1 + at / 256)) {
        for (uint32_t value : {0U, 1U, 0x7FFFFFFFU, 0xFFFFFFFFU}) {
            std::string damaged = blob;
            std::memcpy(&damaged[at], &value, sizeof(value));
            try {
                Node::deserialise(damaged.data(), damaged.size(), chosen);
            } catch (Error const&) {
            }
        }
    }
    return shown(*read);
}

std::string names() {
    std::string out = "[";
    for (FieldSpec const& field : kFields) {
        out += (out.size() > 1 ? ", [" : "[") + quoted(field.name) + ", " +
               std::to_string(static_cast<int>(field.type)) + ", " + std::to_string(field.count) + "]";
    }
    return out + "]";
}

std::string answer(std::istringstream& words) {
    std::string kind, hex;
    words >> kind;
    if (kind == "plan") return plan(words);
    if (kind == "names") return names();
    if (kind == "inflate") {
        std::size_t size = 0;
        words >> size >> hex;
        std::string const packed = fromHex(hex);
        return "{\"bytes\": " + quoted(toHex(inflate(packed.data(), packed.size(), size))) + "}";
    }
    words >> hex;
    return node(hex);
}

}  // namespace

int main() {
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        try {
            std::cout << answer(words) << "\n";
        } catch (std::exception const& error) {
            std::cout << failure(error) << "\n";
        }
    }
}
