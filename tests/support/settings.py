"""Environment variables of the processes that run vLLM here. Standard library only."""

# What an engine needs that runs, and is looked into, in one process on a small machine.
ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU the engine's own process dies being spawned
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # the tensors are tiny: more threads only wait for each other
}
