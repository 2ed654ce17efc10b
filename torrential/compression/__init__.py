"""Compressors of gradients, a file for each: how it encodes and decodes, and what stays behind with the worker."""
