"""Accuracy of dense quantized attention on difficult inputs: `python -m benchmarks.numerics` (docs/numerics.md).

families        all families of inputs, each with the limit of its error
family_inputs   functions that construct the inputs of the families
captured        families of inputs that were recorded in trained models
limits          error limits that depend on the input (of the LSE) or on other errors (of P without exp2)
problem         an input of a family with its exact attention, errors and limits; the tests also use it
"""
