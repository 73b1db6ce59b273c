"""Fetch the headers that the TensorRT plugin is compiled with (10.14.1, Apache-2.0), and print where they lie.

    python scripts/fetch_tensorrt_headers.py [--wheel FILE] [--to FOLDER]

They come from a pip package pinned by hash and are never committed. TensorRT 8 and 11: give `build --tensorrt-include`
the headers that come with that TensorRT.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from sparsedeploy.errors import SparseDeployError
from sparsedeploy.plugins.plugin_build import fetched_headers


def main() -> int:
    """Exit code 0, or that of the error, whose words go to stderr."""
    parser = argparse.ArgumentParser(description="Fetch TensorRT's 10.14.1 headers.")
    parser.add_argument("--wheel", type=Path, help="the package, downloaded before")
    parser.add_argument("--to", type=Path, help="copy the headers into this folder")
    asked = parser.parse_args()
    try:
        folder = fetched_headers(asked.wheel)
    except SparseDeployError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if asked.to:
        folder = Path(shutil.copytree(folder, asked.to, dirs_exist_ok=True))
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
