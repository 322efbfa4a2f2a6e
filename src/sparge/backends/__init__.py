"""Implementations of prediction and attention.

A backend imports `options`, `masks`, `call` and `numerics`, never `api`.
"""
