"""vLLM as the generation engine, in this process or behind HTTP."""
