"""llama.cpp's HTTP server on loopback: python serve_llama_cpp.py FILE PORT"""

import sys
import time

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.port = int(sys.argv[2])
params.n_parallel = 4
params.n_ctx = 4 * 1024
params.cpuparams.n_threads = 2
params.endpoint_slots = True
params.warmup = False
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
while True:
    time.sleep(1)
