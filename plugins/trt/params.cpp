#include "params.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace sparsedeploy {

namespace {

enum FieldNumber : std::size_t {
    kAbi,
    kLayer,
    kKernel,
    kPrecision,
    kGeometry,
    kFixedHw,
    kEpilogue,
    kConstants,
    kParameters,
    kLaunchPlan,
    kImageTable,
    kImages
};

constexpr int32_t kActivations = 4, kResidualPlaces = 3, kImageColumns = 5;

uint64_t hashed(uint64_t hash, void const* data, std::size_t size) {
    auto const* bytes = static_cast<unsigned char const*>(data);
    for (std::size_t i = 0; i < size; ++i) hash = (hash ^ bytes[i]) * 0x100000001B3U;  // FNV-1a
    return hash;
}
constexpr uint64_t kHashStart = 0xCBF29CE484222325U;

int32_t pick(int32_t known, int32_t code, char const* name) {
    if (code < 0 || code >= known) {
        throw Error("field " + std::string(name) + " holds the code " + std::to_string(code) + ", known are 0.." +
                    std::to_string(known - 1));
    }
    return code;
}

void checkCounts(Fields const& fields) {
    for (std::size_t i = 0; i < kFieldCount; ++i) {
        std::string const name = kFields[i].name;
        if (!fields[i].present) throw Error("field " + name + " is missing");
        if (kFields[i].type != FieldType::kInts) continue;
        std::size_t const count = fields[i].ints.size(), needed = static_cast<std::size_t>(kFields[i].count);
        if (needed ? count != needed : count == 0) {
            throw Error("field " + name + " has " + std::to_string(count) + " integers, needed " +
                        (needed ? std::to_string(needed) : "a list"));
        }
    }
}

Geometry readGeometry(std::vector<int32_t> const& v) {
    Geometry const g{v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14]};
    int32_t const smallest =
        std::min({g.oc, g.ic, g.kh, g.kw, g.h, g.w, g.strideH, g.strideW, g.dilationH, g.dilationW, g.group});
    if (smallest < 1 || std::min({g.top, g.left, g.bottom, g.right}) < 0 || g.oc % g.group || g.ic % g.group) {
        std::string shown;
        for (int32_t value : v) shown += (shown.empty() ? "" : ", ") + std::to_string(value);
        throw Error("field geometry is (" + shown + "): sizes must be positive, pads not negative, group a divisor");
    }
    return g;
}

void checkLaunch(Op const& op, int32_t constants, bool residual) {
    std::string const what = "the launch plan's " + op.entry + " ";
    if (op.entry.empty()) throw Error("the launch plan holds a launch without an entry name");
    if (std::min({op.block[0], op.block[1], op.block[2], op.cluster}) < 1 || op.sharedBytes < 0) {
        throw Error(what + "has a block, cluster or shared size that is not positive");
    }
    if (op.args.size() > kMaxArgs) throw Error(what + "takes more than " + std::to_string(kMaxArgs) + " arguments");
    for (Arg const& arg : op.args) {
        bool const isConstant = arg.kind == ArgKind::kConstant, isWorkspace = arg.kind == ArgKind::kWorkspace;
        if (isConstant && (arg.index < 0 || arg.index >= constants)) {
            throw Error(what + "takes constant " + std::to_string(arg.index) + ", the node has " +
                        std::to_string(constants));
        }
        if (isWorkspace && arg.index < 0) throw Error(what + "takes an address before the workspace");
        if (arg.kind == ArgKind::kResidual && !residual) throw Error(what + "takes a residual, the node has none");
    }
}

class Writer {
  public:
    void word(int32_t value) { bytes_.append(reinterpret_cast<char const*>(&value), 4); }
    void block(void const* data, std::size_t size) {
        bytes_.append(static_cast<char const*>(data), size);
        bytes_.append((4 - size % 4) % 4, '\0');
    }
    std::string& bytes() { return bytes_; }

  private:
    std::string bytes_;
};

class Blob {
  public:
    Blob(void const* data, std::size_t size) : data_(static_cast<char const*>(data)), size_(size) {}
    char const* take(std::size_t count) {
        std::size_t const padded = count + (4 - count % 4) % 4;
        if (padded < count || padded > size_ - at_) throw Error("the serialised plugin ends early");
        at_ += padded;
        return data_ + at_ - padded;
    }
    int32_t word() {
        int32_t value;
        std::memcpy(&value, take(4), 4);
        return value;
    }
    bool atEnd() const { return at_ == size_; }

  private:
    char const* data_;
    std::size_t size_, at_ = 0;
};

constexpr int32_t kMagic = 0x43445053;  // "SPDC"
constexpr int32_t kBlobFormat = 1;
constexpr std::size_t kBlobHeader = 5 * 4;

}  // namespace

std::size_t fieldNumber(char const* name) {
    std::size_t number = 0;
    while (number < kFieldCount && std::strcmp(kFields[number].name, name) != 0) ++number;
    return number;
}

std::shared_ptr<Node const> Node::read(Fields fields) {
    Field const& abi = fields[kAbi];
    if (!abi.present || abi.ints.size() != 1 || abi.ints[0] != kAbiVersion) {
        throw Error("field abi is " + (abi.ints.size() == 1 ? std::to_string(abi.ints[0]) : "missing") +
                    ", this plugin reads " + std::to_string(kAbiVersion) +
                    ". Use the plugin that came with the model, or convert the model again with this version.");
    }
    checkCounts(fields);
    std::shared_ptr<Node> node(new Node());
    auto const first = [&fields](FieldNumber number) { return fields[number].ints[0]; };
    pick(kPrecisions, first(kPrecision), "precision");
    node->geometry_ = readGeometry(fields[kGeometry].ints);
    node->fixedHw_ = pick(2, first(kFixedHw), "fixed_hw") != 0;
    pick(2, fields[kEpilogue].ints[0], "epilogue");
    pick(kActivations, fields[kEpilogue].ints[1], "epilogue");
    node->residual_ = pick(kResidualPlaces, fields[kEpilogue].ints[2], "epilogue") != 0;
    node->constants_ = first(kConstants);
    if (node->constants_ < 0) throw Error("field constants is negative");
    std::size_t const parameters = fields[kParameters].ints.size() - 1;
    if (static_cast<int64_t>(first(kParameters)) != static_cast<int64_t>(parameters)) {
        throw Error("field parameters says " + std::to_string(first(kParameters)) + " values and has " +
                    std::to_string(parameters));
    }
    try {
        node->plan_ = decodePlan(fields[kLaunchPlan].ints);
    } catch (Error const& error) {
        throw Error("field launch_plan: " + std::string(error.what()));
    }
    node->fields_ = std::move(fields);
    node->readImages();
    node->checkPlan();
    node->hash_ = kHashStart;
    for (Field const& field : node->fields_) {
        node->hash_ = hashed(node->hash_, field.ints.data(), field.ints.size() * 4);
        node->hash_ = hashed(node->hash_, field.bytes.data(), field.bytes.size());
    }
    return node;
}

void Node::readImages() {
    std::vector<int32_t> const& table = fields_[kImageTable].ints;
    std::string const& blob = fields_[kImages].bytes;
    if (static_cast<int64_t>(table.size()) - 1 != static_cast<int64_t>(table[0]) * kImageColumns) {
        throw Error("field image_table does not fit field images");
    }
    std::size_t offset = 0;
    for (int32_t i = 0; i < table[0]; ++i) {
        int32_t const* row = table.data() + 1 + kImageColumns * i;
        if (row[3] < 1 || row[4] < 0 || static_cast<std::size_t>(row[3]) > blob.size() - offset) {
            throw Error("field image_table: image " + std::to_string(i) + " of " + std::to_string(row[3]) +
                        " bytes is not within field images");
        }
        Image image{};
        image.arch = row[0];
        image.precision = static_cast<Precision>(pick(kPrecisions, row[1], "image_table"));
        image.kind = static_cast<ImageKind>(pick(2, row[2], "image_table"));
        image.offset = offset;
        image.packedSize = static_cast<std::size_t>(row[3]);
        image.size = static_cast<std::size_t>(row[4]);
        image.hash = hashed(kHashStart, blob.data() + offset, image.packedSize);
        offset += image.packedSize;
        images_.push_back(image);
    }
    if (!images_.empty() && offset != blob.size()) {
        throw Error("field images has " + std::to_string(blob.size()) + " bytes, image_table accounts for " +
                    std::to_string(offset));
    }
}

void Node::checkPlan() const {
    for (Variant const& variant : plan_) {
        for (Op const& op : variant.ops) {
            if (op.isMemset && op.offset < 0) throw Error("field launch_plan: a memset before the workspace");
            if (!op.isMemset) checkLaunch(op, constants_, residual_);
        }
    }
}

bool Node::offers(Precision precision) const {
    auto const same = [precision](auto const& item) { return item.precision == precision; };
    return std::any_of(plan_.begin(), plan_.end(), same) && std::any_of(images_.begin(), images_.end(), same);
}

std::size_t Node::serialisedSize() const {
    std::size_t size = kBlobHeader;
    for (std::size_t i = 0; i < kFieldCount; ++i) {
        bool const ints = kFields[i].type == FieldType::kInts;
        size += 4 + (ints ? fields_[i].ints.size() * 4 : (fields_[i].bytes.size() + 3) / 4 * 4);
    }
    return size;
}

std::string Node::serialise(int32_t chosen) const {
    Writer writer;
    for (int32_t word : {kMagic, kBlobFormat, kAbiVersion, chosen, static_cast<int32_t>(kFieldCount)}) {
        writer.word(word);
    }
    for (std::size_t i = 0; i < kFieldCount; ++i) {
        bool const ints = kFields[i].type == FieldType::kInts;
        writer.word(static_cast<int32_t>(ints ? fields_[i].ints.size() : fields_[i].bytes.size()));
        if (ints) {
            writer.block(fields_[i].ints.data(), fields_[i].ints.size() * 4);
        } else {
            writer.block(fields_[i].bytes.data(), fields_[i].bytes.size());
        }
    }
    return std::move(writer.bytes());
}

std::shared_ptr<Node const> Node::deserialise(void const* data, std::size_t size, int32_t& chosen) {
    Blob blob(data, data ? size : 0);
    if (blob.word() != kMagic) throw Error("the engine holds something else where this plugin's data should be");
    int32_t const format = blob.word(), abi = blob.word();
    if (format != kBlobFormat || abi != kAbiVersion) {
        throw Error("the engine holds plugin data of format " + std::to_string(format) + ", ABI " +
                    std::to_string(abi) + "; this plugin reads " + std::to_string(kBlobFormat) + ", " +
                    std::to_string(kAbiVersion) + ". Build the engine again with this plugin.");
    }
    chosen = blob.word();
    if (chosen < -1 || chosen >= kPrecisions) throw Error("the serialised plugin holds an unknown precision");
    if (blob.word() != static_cast<int32_t>(kFieldCount)) throw Error("the serialised plugin lacks fields");
    Fields fields;
    for (std::size_t i = 0; i < kFieldCount; ++i) {
        int32_t const count = blob.word();
        if (count < 0) throw Error("the serialised plugin holds a field of negative size");
        fields[i].present = true;
        if (kFields[i].type == FieldType::kInts) {
            for (int32_t left = count; left > 0; --left) fields[i].ints.push_back(blob.word());
        } else {
            fields[i].bytes.assign(blob.take(static_cast<std::size_t>(count)), static_cast<std::size_t>(count));
        }
    }
    if (!blob.atEnd()) throw Error("the serialised plugin is followed by other data");
    return read(std::move(fields));
}

}  // namespace sparsedeploy
