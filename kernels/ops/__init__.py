"""Attention over base KV and low-rank rows: definitions and the CPU path."""
