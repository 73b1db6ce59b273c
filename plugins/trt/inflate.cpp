#include "inflate.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "plan.h"

namespace sparsedeploy {

namespace {

class Bits {
  public:
    Bits(unsigned char const* data, std::size_t size) : data_(data), size_(size) {}

    /// The next `count` bits, not yet taken; zeros beyond the end.
    uint32_t peek(int count) {
        for (; held_ < count && at_ < size_; held_ += 8) buffer_ |= static_cast<uint64_t>(data_[at_++]) << held_;
        return static_cast<uint32_t>(buffer_) & ((1U << count) - 1U);
    }
    void drop(int count) {
        if (held_ < count) throw Error("the deflated data end early");
        buffer_ >>= count;
        held_ -= count;
    }
    uint32_t take(int count) {
        uint32_t const value = peek(count);
        drop(count);
        return value;
    }
    /// Drops the rest of the current byte.
    void align() { drop(held_ % 8); }
    bool atEnd() const { return at_ == size_ && held_ < 8; }

  private:
    unsigned char const* data_;
    std::size_t size_, at_ = 0;
    uint64_t buffer_ = 0;
    int held_ = 0;
};

constexpr int kLongestCode = 15;
constexpr int kTableBits = 9;

/// A canonical Huffman code: codes of one length are consecutive, in the order of their symbols. Short ones are looked
/// up, since bit by bit a whole network would take seconds on a Jetson.
class Huffman {
  public:
    Huffman(uint8_t const* lengths, int symbols) {
        for (int symbol = 0; symbol < symbols; ++symbol) ++counts_[lengths[symbol]];
        counts_[0] = 0;
        int room = 1, code = 0;
        std::array<int, kLongestCode + 2> index{}, next{};
        for (int length = 1; length <= kLongestCode; ++length) {
            room = room * 2 - counts_[length];
            if (room < 0) throw Error("the deflated data hold an impossible code");
            code = (code + counts_[length - 1]) << 1;
            next[length] = code;
            index[length + 1] = index[length] + counts_[length];
        }
        for (int symbol = 0; symbol < symbols; ++symbol) {
            int const length = lengths[symbol];
            if (length == 0) continue;
            symbols_[index[length]++] = static_cast<uint16_t>(symbol);
            tabulate(next[length]++, length, symbol);
        }
    }

    int decode(Bits& bits) const {
        uint32_t const ahead = bits.peek(kLongestCode);
        uint16_t const entry = table_[ahead & ((1U << kTableBits) - 1U)];
        if (entry) {
            bits.drop(entry & 15);
            return entry >> 4;
        }
        int code = 0, first = 0, index = 0;
        for (int length = 1; length <= kLongestCode; ++length) {
            code |= static_cast<int>(ahead >> (length - 1) & 1U);
            int const count = counts_[length];
            if (code - count < first) {
                bits.drop(length);
                return symbols_[index + code - first];
            }
            index += count;
            first = (first + count) << 1;
            code <<= 1;
        }
        throw Error("the deflated data hold a code that stands for nothing");
    }

  private:
    /// Codes arrive with their first bit lowest.
    void tabulate(int code, int length, int symbol) {
        if (length > kTableBits) return;
        uint32_t reversed = 0;
        for (int bit = 0; bit < length; ++bit) reversed = reversed << 1 | (code >> bit & 1);
        for (uint32_t at = reversed; at < table_.size(); at += 1U << length) {
            table_[at] = static_cast<uint16_t>(symbol << 4 | length);
        }
    }

    std::array<int, kLongestCode + 1> counts_{};
    std::array<uint16_t, 288> symbols_{};
    std::array<uint16_t, 1 << kTableBits> table_{};
};

class Output {
  public:
    explicit Output(std::size_t size) : bytes_(size, '\0') {}
    void put(char byte) {
        if (filled_ == bytes_.size()) throw Error("the deflated data hold more bytes than the table says");
        bytes_[filled_++] = byte;
    }
    void repeat(std::size_t distance, std::size_t length) {
        if (distance > filled_) throw Error("the deflated data refer to bytes before their start");
        for (; length > 0; --length) put(bytes_[filled_ - distance]);
    }
    bool full() const { return filled_ == bytes_.size(); }
    std::string& bytes() { return bytes_; }

  private:
    std::string bytes_;
    std::size_t filled_ = 0;
};

void copyStored(Bits& bits, Output& out) {
    bits.align();
    uint32_t const length = bits.take(16);
    if (bits.take(16) != (length ^ 0xFFFFU)) throw Error("the deflated data hold a damaged stored block");
    for (uint32_t i = 0; i < length; ++i) out.put(static_cast<char>(bits.take(8)));
}

void copyCoded(Bits& bits, Output& out, Huffman const& literals, Huffman const& distances) {
    static constexpr uint16_t kLength[29] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                             31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
    static constexpr uint8_t kLengthBits[29] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                                2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
    static constexpr uint16_t kDistance[30] = {1,    2,    3,    4,    5,    7,    9,    13,    17,    25,
                                               33,   49,   65,   97,   129,  193,  257,  385,   513,   769,
                                               1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
    static constexpr uint8_t kDistanceBits[30] = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                                  6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};
    for (;;) {
        int const symbol = literals.decode(bits);
        if (symbol == 256) return;
        if (symbol < 256) {
            out.put(static_cast<char>(symbol));
            continue;
        }
        if (symbol > 285) throw Error("the deflated data hold an impossible length");
        std::size_t const length = kLength[symbol - 257] + bits.take(kLengthBits[symbol - 257]);
        int const code = distances.decode(bits);
        if (code > 29) throw Error("the deflated data hold an impossible distance");
        out.repeat(kDistance[code] + bits.take(kDistanceBits[code]), length);
    }
}

void copyFixed(Bits& bits, Output& out) {
    uint8_t lengths[288], distances[30];
    for (int i = 0; i < 288; ++i) lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
    for (uint8_t& length : distances) length = 5;
    copyCoded(bits, out, Huffman(lengths, 288), Huffman(distances, 30));
}

void copyDynamic(Bits& bits, Output& out) {
    static constexpr uint8_t kOrder[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    int const literals = static_cast<int>(bits.take(5)) + 257, distances = static_cast<int>(bits.take(5)) + 1;
    int const codes = static_cast<int>(bits.take(4)) + 4;
    if (literals > 286 || distances > 30) throw Error("the deflated data hold an impossible code");
    uint8_t lengths[286 + 30] = {};
    for (int i = 0; i < codes; ++i) lengths[kOrder[i]] = static_cast<uint8_t>(bits.take(3));
    Huffman const code(lengths, 19);
    uint8_t previous = 0;
    for (int at = 0; at < literals + distances;) {
        int const symbol = code.decode(bits);
        uint8_t length = 0;
        uint32_t times = 1;
        if (symbol < 16) {
            length = static_cast<uint8_t>(symbol);
        } else if (symbol == 16) {
            if (at == 0) throw Error("the deflated data repeat a length before the first");
            length = previous;
            times = 3 + bits.take(2);
        } else {
            times = symbol == 17 ? 3 + bits.take(3) : 11 + bits.take(7);
        }
        if (at + static_cast<int>(times) > literals + distances) throw Error("the deflated data hold too many lengths");
        for (; times > 0; --times) lengths[at++] = length;
        previous = length;
    }
    if (lengths[256] == 0) throw Error("the deflated data hold a block without an end");
    copyCoded(bits, out, Huffman(lengths, literals), Huffman(lengths + literals, distances));
}

uint32_t adler32(std::string const& bytes) {
    uint32_t a = 1, b = 0;
    // As many bytes as 32 bits can sum before a remainder must be taken.
    constexpr std::size_t kBlock = 5552;
    for (std::size_t at = 0; at < bytes.size(); at += kBlock) {
        std::size_t const end = std::min(at + kBlock, bytes.size());
        for (std::size_t i = at; i < end; ++i) {
            a += static_cast<unsigned char>(bytes[i]);
            b += a;
        }
        a %= 65521U;
        b %= 65521U;
    }
    return b << 16 | a;
}

}  // namespace

std::string inflate(char const* packed, std::size_t packedSize, std::size_t size) {
    auto const* data = reinterpret_cast<unsigned char const*>(packed);
    bool const isZlib = packedSize >= 6 && (data[0] & 15) == 8 && (data[0] << 8 | data[1]) % 31 == 0 && !(data[1] & 32);
    if (!isZlib) throw Error("the deflated data are no zlib stream");
    Bits bits(data + 2, packedSize - 2);
    Output out(size);
    for (bool last = false; !last;) {
        last = bits.take(1) != 0;
        switch (bits.take(2)) {
            case 0:
                copyStored(bits, out);
                break;
            case 1:
                copyFixed(bits, out);
                break;
            case 2:
                copyDynamic(bits, out);
                break;
            default:
                throw Error("the deflated data hold an unknown kind of block");
        }
    }
    bits.align();
    uint32_t checksum = 0;
    for (int i = 0; i < 4; ++i) checksum = checksum << 8 | bits.take(8);
    if (!out.full()) throw Error("the deflated data hold fewer bytes than the table says");
    if (!bits.atEnd()) throw Error("the deflated data are followed by others");
    if (checksum != adler32(out.bytes())) throw Error("the deflated data do not have their checksum");
    return std::move(out.bytes());
}

}  // namespace sparsedeploy
