#!/bin/sh
# Install the frameworks into a virtual environment; $1 is its folder bin.
set -eu

BIN=$(cd "$1" && pwd)
PATH=$BIN:$PATH
cd "$(dirname "$0")/../../.."
pip install --quiet --requirement requirements-frameworks.txt

# The wheels of torchvision are built for CUDA. Beside a torch for CPUs their compiled
# operators do not load, and the import fails because two of them do not exist
# ("operator torchvision::nms does not exist"). If these two are declared, without code,
# the import works: models, data sets and transforms are Python. A torchvision that
# loads is left unchanged.
if ! python -c 'import torchvision' 2> /dev/null; then
    FOLDER=$(python -c 'from importlib.util import find_spec as f
print(*f("torchvision").submodule_search_locations)')
    cat >> "$FOLDER/extension.py" << 'EOF'

# By tests/more/frameworks/install.sh of torchrun_hpc:
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(_name + "(Tensor dets, Tensor scores, float threshold) -> Tensor")
EOF
    python -c 'import torchvision'
fi

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
