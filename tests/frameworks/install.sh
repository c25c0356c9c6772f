#!/bin/sh
# Install the frameworks into a virtual environment; $1 is its folder bin.
set -eu

PATH=$(cd "$1" && pwd):$PATH
cd "$(dirname "$0")/../.."
pip install --quiet --requirement requirements-frameworks.txt

# On CPUs DeepSpeed compiles a part of itself at its first start, for up to a minute.
# Here it has no test to keep waiting; where it fails, the test says why.
if command -v c++ > /dev/null; then
    python -c '
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
ShareMemCommBuilder().load()
' > /dev/null 2>&1 || true
fi
