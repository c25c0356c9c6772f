#!/bin/sh
# Install the frameworks into a virtual environment; $1 is its folder bin.
set -eu

BIN=$(cd "$1" && pwd)
PATH=$BIN:$PATH
cd "$(dirname "$0")/../.."
pip install --quiet --requirement requirements-frameworks.txt

# On CPUs DeepSpeed compiles a part of itself at its first start. It is built here, once,
# with no test to keep waiting, and takes its place when it is complete: torch would wait
# for ever for the lock of a build that was ended. Where it fails, the test shows why.
BUILT=$BIN/../torch_extensions
rm -rf "$BUILT" "$BUILT.new" "$BUILT.log"
command -v c++ > /dev/null || exit 0
if TORCH_EXTENSIONS_DIR=$BUILT.new python -c '
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
ShareMemCommBuilder().load()
' > "$BUILT.log" 2>&1; then
    mv "$BUILT.new" "$BUILT"
    rm "$BUILT.log"
else
    cat "$BUILT.log" >&2
fi
