"""LLM serving taken apart: render, prefill, decode, derender."""

__version__ = "0.1.0"
