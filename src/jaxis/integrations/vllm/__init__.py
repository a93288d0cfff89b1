"""jaxis inside vLLM: its models, kernels and sampler under vLLM's own scheduler and server.

    VLLM_PLUGINS=jaxis vllm serve Qwen/Qwen3-0.6B --dtype float32

vLLM loads `plugin.py` by its entry points, in every process. The platform (`platform.py`) checks the configuration and
each request in vLLM's front end, where no JAX is imported. The worker (`worker.py`) has the model, and runs the steps
of vLLM's scheduler over vLLM's own block tables (`model_runner.py`).
"""
