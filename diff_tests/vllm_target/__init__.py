"""Runs the real vLLM in a child process. The only folder that imports vllm, and only the child does."""
