// Inflating zlib streams (RFC 1950, 1951) without zlib, which no target is sure to have.
#pragma once

#include <cstddef>
#include <string>

namespace sparsedeploy {

/// The `size` bytes that `packed` deflates. Error when the stream is damaged, ends early, holds another number of
/// bytes, has a wrong checksum, or is followed by anything.
std::string inflate(char const* packed, std::size_t packedSize, std::size_t size);

}  // namespace sparsedeploy
