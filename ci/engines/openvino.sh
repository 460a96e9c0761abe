#!/bin/sh
# OpenVINO GenAI's continuous batching: some 30 s to install, 300 MB.
. "$(dirname "$0")/common.sh"
environment openvino
"$BIN/pip" install -q openvino-genai==2026.4.1.0
"$BIN/pip" install -q gguf==0.17.1 safetensors==0.8.0 numpy
# It reads half precision only, and vocabularies of GPT-2's kind.
"$BIN/python" ci/engines/to_gguf.py --f16 --gpt2 "$MODEL" build/engines/model-f16.gguf
serve 8822 "$BIN/python" ci/engines/serve_openvino.py build/engines/model-f16.gguf 8822
audit openvino --base-url http://127.0.0.1:8822/v1 --model m --reference bundled
