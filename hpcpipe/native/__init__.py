"""The compiled side of the update rules: C++ and CUDA sources, and the loader that says why they cannot be used.

Importing this package loads nothing compiled.
"""
