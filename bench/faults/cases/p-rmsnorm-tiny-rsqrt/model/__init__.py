from .lm import MiniLM

__all__ = ["MiniLM"]
