// Where the plugin's words go: TensorRT's logger when it can be found, else stderr.
#pragma once

#include <string>

namespace sparsedeploy {

void logError(std::string const& words);

}  // namespace sparsedeploy
