"""Adapters: an engine's own call sites run through multiassert, with no change to the engine.

Each is a module of the engine's name. None imports its engine before it is asked to.
"""
