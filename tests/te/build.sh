#!/bin/sh
# TransformerEngine in an environment of its own, for `make te`; no GPU and no CUDA toolkit needed.
#
# The package's own build compiles 33 files with -O3, each of which reads all of torch's headers. Here they are one
# translation unit, unoptimised: kernels are in the wheel of libtransformer_engine, this is host code. It takes six
# to ten minutes and 4 GiB. Tried with TransformerEngine 2.20.2 and torch 2.14.1 (CUDA 13.0) on Python 3.11.
set -e
env=$1 TE=2.20.2 TORCH=2.14.1 CUDA=13.0
PYTHON=${PYTHON:-python3}
test -x "$env/bin/python" || $PYTHON -m venv "$env"
pip="$env/bin/python -m pip --disable-pip-version-check"
grep -v "^torch==" constraints.txt > "$env/constraints.txt"
$pip install --quiet "torch==$TORCH" "nvidia-cuda-crt==$CUDA.*" "nvidia-cuda-cccl==$CUDA.*"
# The wheel of transformer_engine_torch's Python code is the one of the libraries.
$pip install --quiet --no-deps "transformer_engine==$TE" "transformer_engine_cu13==$TE"
$pip install --quiet --constraint "$env/constraints.txt" "torch==$TORCH" setuptools wheel packaging \
  einops importlib-metadata nvdlfw-inspect onnx onnxscript pydantic "nvidia-cudnn-frontend>=1.29"
$pip install --quiet --constraint "$env/constraints.txt" --editable '.[test]' "torch==$TORCH"

env=$(cd "$env" && pwd)
site=$("$env/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
module=$site/transformer_engine_torch$("$env/bin/python" -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
test -f "$module" && exit

src=$env/src/transformer_engine_torch-$TE
rm -rf "$env/src"
$pip download --quiet --no-deps --no-build-isolation --no-binary :all: --dest "$env/src" "transformer_engine_torch==$TE"
tar xf "$src.tar.gz" -C "$env/src"
cd "$src"
for file in csrc/*.cpp csrc/extensions/*.cpp csrc/extensions/multi_tensor/*.cpp; do echo "#include \"$file\""; done > all.cpp
include() { for path; do printf -- "-isystem %s " "$path"; done; }
headers=$("$env/bin/python" -c "import sysconfig; print(sysconfig.get_path('include'))")
echo "compiling transformer_engine_torch $TE (six to ten minutes)"
"${CXX:-g++}" -std=c++20 -O0 -g0 -fPIC -shared -w -fvisibility=hidden \
  -DTORCH_API_INCLUDE_EXTENSION_H -DTORCH_EXTENSION_NAME=transformer_engine_torch -DNVTE_WITH_NCCL_EP -DUSE_NCCL \
  -I. -Icommon_headers -Icommon_headers/common -Icommon_headers/common/include -Icsrc -Icsrc/extensions \
  $(include "$site/nvidia/cu13/include" "$site/nvidia/cu13/include/cccl" "$site/nvidia/cudnn/include" \
    "$site/nvidia/nccl/include" "$site/torch/include" "$site/torch/include/torch/csrc/api/include" "$headers") \
  all.cpp -o "$module.part" \
  -L"$site/torch/lib" -lc10 -lc10_cuda -ltorch -ltorch_cpu -ltorch_cuda -ltorch_python \
  -L"$site/nvidia/cu13/lib" -l:libcudart.so.13 \
  -Wl,-rpath,"$site/torch/lib" -Wl,-rpath,"$site/nvidia/cu13/lib"
mv "$module.part" "$module"
