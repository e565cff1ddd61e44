"""Share one KV cache between LoRA agents on SGLang."""

__version__ = "0.1.0"
