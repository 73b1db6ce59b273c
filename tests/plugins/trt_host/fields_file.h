// The fields of a node as the tests write them: one line each, `name type hex`, type i (INT32), l (INT64), c or b.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

struct FileField {
    std::string name;
    char type;
    std::string bytes;
};

inline std::string fromHex(std::string const& hex) {
    std::string bytes;
    for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
        bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    }
    return bytes;
}

inline std::string toHex(std::string const& bytes) {
    static char const digits[] = "0123456789abcdef";
    std::string hex;
    for (unsigned char byte : bytes) {
        hex += digits[byte >> 4];
        hex += digits[byte & 15];
    }
    return hex;
}

inline std::vector<FileField> readFieldsFile(std::string const& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path);
    std::vector<FileField> fields;
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        FileField field;
        std::string hex;
        words >> field.name >> field.type >> hex;
        field.bytes = fromHex(hex);
        fields.push_back(field);
    }
    return fields;
}

inline std::vector<int32_t> asInts(std::string const& bytes) {
    std::vector<int32_t> ints(bytes.size() / 4);
    if (!ints.empty()) std::memcpy(ints.data(), bytes.data(), ints.size() * 4);
    return ints;
}

/// As JSON.
inline std::string quoted(std::string const& text) {
    std::string out = "\"";
    for (unsigned char c : text) {
        if (c < 32) {
            out += "\\u00" + toHex(std::string(1, static_cast<char>(c)));
        } else {
            if (c == '"' || c == '\\') out += '\\';
            out += static_cast<char>(c);
        }
    }
    return out + "\"";
}
