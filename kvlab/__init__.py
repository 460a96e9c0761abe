"""KV Cache Isolation Lab: who may read whose keys and values, and how to find out."""

__version__ = "0.1.0"
