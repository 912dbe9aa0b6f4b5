"""Attention recognised by what it computes: softmax(scale * Q K^T + bias) V, whatever it is written with."""
