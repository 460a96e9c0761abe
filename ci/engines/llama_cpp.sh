#!/bin/sh
# llama.cpp's HTTP server, as the package xllamacpp builds it: some 20 s to install, 130 MB.
. "$(dirname "$0")/common.sh"
environment llama_cpp
"$BIN/pip" install -q --no-deps xllamacpp==2026.10.11549
"$BIN/pip" install -q gguf==0.17.1 safetensors==0.8.0 numpy==2.4.6
"$BIN/python" ci/engines/to_gguf.py "$MODEL" build/engines/model-f32.gguf
serve 8891 "$BIN/python" ci/engines/serve_llama_cpp.py build/engines/model-f32.gguf 8891
audit llama_cpp --engine llama.cpp --base-url http://127.0.0.1:8891 --reference bundled \
    --name "llama.cpp (xllamacpp 2026.10.11549)"
